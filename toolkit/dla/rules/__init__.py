"""What the DLA supports: one row per limit, and the judge that applies them.

rule            a rule, its facts and allowed values, its verdict
ops             operators that the DLA supports
general_rules   versions, precisions, operators, limits of every tensor; facts in general_checks
layer_rules     limits of each layer; facts in layer_checks
verdicts        the judge: the rules that refuse a node
explain         every rule on a node, with value and limit
memory          limits of loadables and memory pools
formats         memory formats of tensors that cross to or from the DLA
notes           remarks that are not limits
meanings        what each rule means, and what to do about it
"""
