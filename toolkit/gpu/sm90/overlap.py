"""Lets tensor cores of sm_90 multiply a step of INT8 while threads start the copies of the next.

Triton ends each step of a loop by waiting for its products where sums are not FP32 (rule 2.1 of
`dotCanBeProperlyAsync` in its WGMMAPipeline.cpp), and for those of the step before where they are.
Otherwise the two loops are the same: shared memory has one stage more for operands than copies are
under way, so the stage that is written next was read by the step before. So INT32 sums may wait as
FP32 ones do, and for the last step behind the loop. PTX ISA, "wgmma.wait_group".

What that rests on is looked for in the text: both operands lie in shared memory, and copies begin
behind a wait and a barrier after it. A wait is for products of a thread's own four warps; behind
the barrier, those of all warps of the step before have ended, and their stage may be written.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

_LABEL = re.compile(r"(\$L__BB\w+):")
_BRANCH = re.compile(r"\t(?:@!?%p\d+ )?bra(?:\.uni)?\s+(\$L__BB\w+);")
_ANY_PRODUCT = "\twgmma.mma_async"
_PRODUCT = re.compile(r"\twgmma\.mma_async\S*\.s32\.s8\.s8 \{([^}]*)\},\s*%rd\d+")
_WAIT = re.compile(r"\twgmma\.wait_group\.sync\.aligned\s+0;")
_BARRIER = re.compile(r"\tbar\.sync\s+0;")
_COPY = re.compile(r"\bcp\.async\.c[ag]\.")
_STORE = re.compile(r"\bst(?:\.\w+)*\.shared|\bstmatrix")
_REGISTER = re.compile(r"%r\d+\b")
_FOR_LAST, _FOR_ALL = (f"\twgmma.wait_group.sync.aligned {pending};" for pending in (1, 0))


def with_overlap(ptx: str) -> str:
    """Return PTX whose steps wait for the INT8 products of the step before, where they may."""
    lines = ptx.split("\n")
    for block in _blocks(lines):
        if not _of_int8(lines[at] for at in block):
            continue
        waits = [at for at in block if _WAIT.match(lines[at])]
        sums = _sums(lines[at] for at in block)
        back = _BRANCH.match(lines[block[-1]])
        label = _LABEL.match(lines[block[0]])
        if back and label and back[1] == label[1]:
            inside = [lines[at] for at in block[1:-1]]
            if waits and any(map(_COPY.search, inside)) and _only_adds(inside, sums):
                for at in waits:
                    lines[at] = _FOR_LAST
                lines[block[-1]] += f"\n{_FOR_ALL}"
        else:  # steps of a loop that was unrolled; the last wait stays
            for first, second in pairwise(waits):
                if _only_adds(lines[first:second], sums):
                    lines[first] = _FOR_LAST
    return "\n".join(lines)


def _blocks(lines: Sequence[str]) -> Iterator[range]:
    """Yield ranges of lines that begin with a label or behind a branch, and end with a branch."""
    start = 0
    for at, line in enumerate(lines):
        if _LABEL.match(line) and at > start:
            yield range(start, at)
            start = at
        elif _BRANCH.match(line):
            yield range(start, at + 1)
            start = at + 1
    if start < len(lines):
        yield range(start, len(lines))


def _of_int8(lines: Iterator[str]) -> bool:
    """Whether all products are of INT8, with both operands in shared memory."""
    return all(map(_PRODUCT.match, (line for line in lines if line.startswith(_ANY_PRODUCT))))


def _sums(lines: Iterator[str]) -> set[str]:
    """Return the registers that products are added to."""
    products = filter(None, map(_PRODUCT.match, lines))
    return {name for product in products for name in _REGISTER.findall(product[1])}


def _only_adds(lines: Sequence[str], sums: set[str]) -> bool:
    """Whether lines do nothing with the sums but add products of operands that were copied.

    Copies begin where the products of the step before have ended.
    """
    others = [line for line in lines if not _PRODUCT.match(line) and not line.startswith("\t//")]
    return (
        any(map(_PRODUCT.match, lines))
        and not any(map(_STORE.search, lines))
        and _copies_behind_barriers(lines)
        and sums.isdisjoint(name for line in others for name in _REGISTER.findall(line))
    )


def _copies_behind_barriers(lines: Sequence[str]) -> bool:
    """Whether each copy has a wait for products before it, and then a barrier."""
    waited = ended = False
    for line in lines:
        if line.startswith(_ANY_PRODUCT):
            waited = ended = False
        elif _WAIT.match(line):
            waited = True
        elif _BARRIER.match(line):
            ended = waited
        elif _COPY.search(line) and not ended:
            return False
    return True
