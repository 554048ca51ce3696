"""A farm of boards: jobs for boards that others lend, repeated until boards agree.

values   what a farm is asked, what happens to it, and what it says in the end
machine  (state, event) -> (state, effects), pure: who gets which job, who is dead, who lies
run      a run of the farm: leases in the fleet's store, signed commands and kits over MQTT
"""
