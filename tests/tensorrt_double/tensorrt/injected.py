"""Failures of single calls of the double, named from outside.

    TENSORRT_DOUBLE_INJECT   one or more of these, with ";" between

    CLASS.MEMBER=raise       the call raises RuntimeError; a constructor, too
    CLASS.MEMBER=null        it returns None; a constructor raises, as pybind11 does then
    CLASS.MEMBER=false       it returns False
    CLASS.MEMBER=empty       it returns no bytes
    CLASS.MEMBER=segfault    it ends the process; `__del__` stands for the destructor
    ...@N                    from the N-th call on, 1 by default

    import=TEXT              the import raises ImportError with this text
    exit=segfault            the process ends with SIGSEGV when it leaves, after its answer
    exit=noise               it leaves with a line of the DLA's runtime on standard output
    exit=hang                it does not leave
    disk=full                a file cannot be brought to the disk
    constants=DEVICE         the parser makes a constant layer and a Shuffle of it; without fallback
                             the build stops at it, with fallback a layer of both runs on DEVICE
    constants=fails:LINE     with fallback the build stops, too, with this error
    constants=crashes:LINE   ... and the process ends with SIGSEGV
    outputs=zero|nan|inf     what a plan computes is overwritten
    outputs=...@FILE         while this file is there: a process that runs can begin with it
    trace=                   every call is noted in CALLS

A value that is read or written is a call, too: `Runtime.num_DLA_cores=raise`.
"""

import atexit
import errno
import os
import signal
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np

_VALUES = {"null": None, "false": False, "empty": b""}


def apply(module):
    """Let the calls fail that the environment names. `module`: the globals of the double."""
    for text in filter(None, os.environ.get("TENSORRT_DOUBLE_INJECT", "").split(";")):
        what, _, how = text.partition("=")
        if what == "import":
            raise ImportError(how)
        if what in _WHOLE:
            _WHOLE[what](module, how)
        else:
            class_name, _, member = what.partition(".")
            _inject(module[class_name], member, *how.split("@"))


def _inject(owner, member, how, begin="1"):
    """Let one member of a class fail from its `begin`-th call on."""
    calls = 0

    def failing(call):
        def instead(*arguments, **named):
            nonlocal calls
            calls += 1
            return _fail(member, how) if calls >= int(begin) else call(*arguments, **named)

        return instead

    if member == "__init__" and hasattr(owner, "__del__"):  # nothing was made that could go
        owner.__del__ = lambda self: None
    original = vars(owner).get(member, lambda self: None)
    if isinstance(original, property):
        setter = original.fset and failing(original.fset)
        setattr(owner, member, property(failing(original.fget), setter))
    elif member in _SLOTS:
        setattr(owner, member, property(failing(_SLOTS[member]), failing(_setter(member))))
    else:
        setattr(owner, member, failing(original))


_SLOTS = {  # attributes that the double keeps as they are set
    name: lambda self, name=name: vars(self).get(f"_{name}_")
    for name in ("DLA_core", "default_device_type", "profiling_verbosity", "name", "dtype",
                 "allowed_formats", "precision")
}  # fmt: skip


def _setter(name):
    return lambda self, value: object.__setattr__(self, f"_{name}_", value)


def _fail(member, how):
    if how == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "null" and member == "__init__":
        raise TypeError("pybind11::init(): factory function returned nullptr")
    if how == "raise":
        raise RuntimeError(f"{member} fails in C++")
    return _VALUES[how]


def _exit(module, how):
    leave = os._exit

    def crash(status=0):
        if how == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "hang":
            time.sleep(3600)
        os.write(1, b"NVMEDIA_DLA : 1914, ERROR: the runtime says so on standard output\n")
        leave(status)

    os._exit = crash
    atexit.register(crash)


def _disk(module, how):
    def full(number):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.fsync = full


def _constants(module, how):
    device, _, line = how.partition(":")
    parse = module["OnnxParser"].parse_from_file
    can_run = module["IBuilderConfig"].can_run_on_DLA
    build = module["Builder"].build_serialized_network
    information = module["EngineInspector"].get_engine_information
    added = ("const0", "(Unnamed Layer* 1) [Shuffle]")

    def parsed(self, model):
        good = parse(self, model)
        tensors = [module["ITensor"](f"{name}_out", (), module["DataType"].FLOAT) for name in added]
        kinds = ("Constant", "Reshape")
        for index, (name, kind) in enumerate(zip(added, kinds, strict=True)):
            node = SimpleNamespace(name=name, op_type=kind)
            layer = module["ILayer"](node, [tensors[index]], tensors[:index])
            self._network._layers.insert(index, layer)
        return good

    def built(self, network, config):
        if "GPU_FALLBACK" in config._flags and line:
            self._logger.log(module["ILogger"].ERROR, line)
            if device == "crashes":
                os.kill(os.getpid(), signal.SIGSEGV)
            return None
        if "GPU_FALLBACK" in config._flags or "DLA" not in config.default_device_type.name:
            return build(self, network, config)
        self._logger.log(
            module["ILogger"].ERROR,
            f"Default DLA is enabled but layer {added[0]} is not supported on DLA and falling back "
            "to GPU is not enabled.",
        )
        return None

    def inspected(self, format):
        if device != "dla":
            self._layers = [*self._layers, "Reformatting CopyNode for Input Tensor 0 to const0"]
        return information(self, format)

    module["OnnxParser"].parse_from_file = parsed
    module["IBuilderConfig"].can_run_on_DLA = lambda self, layer: (
        layer.name not in added and can_run(self, layer)
    )
    module["Builder"].build_serialized_network = built
    module["EngineInspector"].get_engine_information = inspected


def _outputs(module, how):
    run = module["IExecutionContext"]._run
    how, _, switch = how.partition("@")

    def spoiled(self, addresses, shapes=None):
        run(self, addresses, shapes)
        if switch and not os.path.exists(switch):
            return
        for name, port in self._ports.items():
            if port["kind"] == "output":
                shape = (shapes or self._shapes)[name]
                memory = module["_view"](port, addresses[name], shape)
                real = how != "zero" and np.issubdtype(memory.dtype, np.floating)
                memory[...] = float(how) if real else 0

    module["IExecutionContext"]._run = spoiled


_WHOLE = {"exit": _exit, "disk": _disk, "constants": _constants, "outputs": _outputs}


CALLS: Counter[str] = Counter()
"""How often a call was made, as CLASS.MEMBER, under `trace=`."""


def _trace(module, how):
    names = ("Builder", "EngineInspector", "IBuilderConfig", "ICudaEngine", "IExecutionContext",
             "ILayer", "INetworkDefinition", "ITensor", "ITimingCache", "OnnxParser", "Runtime",
             "Logger", "IOptimizationProfile")  # fmt: skip
    for name in names:
        owner = module[name]
        for member, value in list(vars(owner).items()):
            if member != "__init__" and member.startswith("_"):
                continue
            if isinstance(value, property):
                setter = value.fset and _noting(name, member, value.fset)
                setattr(owner, member, property(_noting(name, member, value.fget), setter))
            elif callable(value):
                setattr(owner, member, _noting(name, member, value))


def _noting(name, member, call):
    def noted(*arguments, **named):
        CALLS[f"{name}.{member}"] += 1
        return call(*arguments, **named)

    return noted


_WHOLE["trace"] = _trace
