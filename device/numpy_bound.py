"""Which NumPy may stand beside a board's OpenCV: `python3 numpy_bound.py` prints pip's constraint.

An extension that was built with NumPy 1 does not load beside NumPy 2 ("numpy.core.multiarray
failed to import"); one that was built with NumPy 2 loads beside both. cv2 itself tells: from 2.0 on
NumPy's headers make an extension look for `numpy._core` (`__multiarray_api.h`). It is read, not
imported: a NumPy that is wrong already would forbid that.

This file runs alone, on any Python 3, before anything of Tandem is installed.
"""

import os
from importlib import util

ANY_NUMPY = "numpy>=1.23"
NUMPY_1 = "numpy>=1.23,<2"
NEW_HEADERS = b"numpy._core"


def numpy_bound() -> str:
    """Return the constraint for the Python that runs this; without a cv2 any NumPy will do."""
    return NUMPY_1 if cv2_numpy() == 1 else ANY_NUMPY


def cv2_numpy() -> int:
    """Return the generation of NumPy that cv2 was built with, 0 where there is no cv2."""
    try:
        spec = util.find_spec("cv2")
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.origin:
        return 0
    files = [spec.origin]
    if spec.submodule_search_locations:
        folders = os.walk(os.path.dirname(spec.origin))
        files = [os.path.join(folder, name) for folder, _, names in folders for name in names]
    generation = 0
    for path in files:
        if not os.path.basename(path).startswith("cv2.") or not path.endswith(".so"):
            continue
        with open(path, "rb") as file:
            if NEW_HEADERS not in file.read():
                return 1
        generation = 2
    return generation


if __name__ == "__main__":
    print(numpy_bound())
