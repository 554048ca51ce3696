"""libtandem, the C and C++ runtime: verdicts and results are those of the Python reader.

The GPU is the double of the driver, behind a libcuda.so.1 that the library loads itself.
"""

import ctypes
import dataclasses
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cuda_double
import numpy as np
import onnx
import onnxruntime
import pytest
from docs_fixtures import ROOT
from engine_fixtures import (
    OPSET,
    node,
    picture,
    single_network,
    split_network,
    without_checksums,
    write_network,
)
from engine_mutants import mutant_bases, mutated
from model_fixtures import small_convnet
from msgspec.structs import replace
from native_fixtures import (
    NATIVE,
    Native,
    NativeError,
    NativeSession,
    compiled,
    compiled_shim,
    connect,
)

from device.engine.file import open_engine
from device.engine.manifest import DimRange
from device.errors import EngineError
from device.runtime.session import open_session
from toolkit.engine.build import BuildOptions, build_engine


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Native:
    return compiled(tmp_path_factory)


@pytest.fixture
def opened(native: Native, tmp_path: Path) -> Iterator[NativeSession]:
    path = write_network(tmp_path / "e", split_network("batch"))
    session = NativeSession(native, path)
    yield session
    session.close()


def test_an_engine_says_what_it_takes_and_gives(native: Native, opened: NativeSession) -> None:
    assert native.infos(opened.engine, "input") == [("x", "float32", (-1, 3, 16, 16))]
    assert native.infos(opened.engine, "output") == [("y", "float32", (-1, 10))]
    assert native.count("engine_dim", opened.engine) == 1
    assert [kind for _, kind, _ in opened.reports()] == ["portable"] * 4


def test_results_are_those_of_the_python_session(
    opened: NativeSession, tmp_path: Path, rng: np.random.Generator
) -> None:
    with open_session(tmp_path / "e", threads=1) as session:
        for batch in (1, 4, 2):
            x = rng.normal(size=(batch, 3, 16, 16)).astype(np.float32)
            expected = session.infer({"x": x})["y"]
            assert opened.infer({"x": x})["y"].tobytes() == expected.tobytes()
            target = np.empty_like(expected)
            opened.infer({"x": x}, {"y": target})
            assert target.tobytes() == expected.tobytes()


def misfits() -> list[tuple[dict[str, np.ndarray], str]]:
    x = picture()
    return [
        ({}, "the input lacks 'x'; give 'x'"),
        ({"images": x}, "the input lacks 'x' and does not take 'images'; give 'x'"),
        ({"x": x.astype(np.float64)}, "input 'x' is of float64; give float32"),
        ({"x": x[0]}, "input 'x' has the shape (3, 16, 16); give (batch, 3, 16, 16)"),
        ({"x": x[:, :2].copy()}, "has the size 2 in dimension 1, the engine takes 3"),
        ({"x": np.repeat(x, 5, 0)}, "has the size 5 in dimension 0 ('batch'), the engine takes 1"),
        ({"x": x, "z": x, "a": x}, "the input does not take 'a', 'z'; give 'x'"),
    ]


@pytest.mark.parametrize(("feeds", "message"), misfits())
def test_feeds_that_do_not_fit_are_named(
    opened: NativeSession, feeds: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(NativeError) as caught:
        opened.infer(feeds)
    assert message in str(caught.value)
    assert caught.value.status == 2
    assert opened.infer({"x": picture()})["y"].shape == (1, 10)  # nothing was spoilt


def test_targets_that_do_not_fit_are_named(opened: NativeSession) -> None:
    with pytest.raises(NativeError, match=r"output 'y' has the shape \(1, 9\); give \(1, 10\)"):
        opened.infer({"x": picture()}, {"y": np.empty((1, 9), np.float32)})


def test_calls_that_no_caller_should_make_are_refused(
    native: Native, opened: NativeSession
) -> None:
    null = ctypes.c_void_p()
    for name, arguments in (
        ("engine_open", (None, null)),
        ("engine_verify", (null,)),
        ("engine_input", (null, ctypes.c_size_t(0), null)),
        ("session_report", (null, ctypes.c_size_t(0), null)),
        ("session_infer", (null, null, ctypes.c_size_t(1), null, ctypes.c_size_t(0))),
        ("session_output", (null, ctypes.c_size_t(0), null)),
    ):
        with pytest.raises(NativeError) as caught:
            native.call(name, *arguments)
        assert caught.value.status == 3, name
    with pytest.raises(NativeError, match="no output 'z' to write into an array; there are 'y'"):
        opened.infer({"x": picture()}, {"z": np.empty((1, 10), np.float32)})
    assert native.count("engine_input", null) == 0


def test_a_tensor_that_comes_in_another_shape_than_the_manifest_says_ends_the_run(
    native: Native, tmp_path: Path
) -> None:
    network = single_network()
    wrong = replace(network.tensor("y"), shape=(2, 10))
    tensors = tuple(wrong if one.name == "y" else one for one in network.tensors)
    path = write_network(tmp_path / "e", dataclasses.replace(network, tensors=tensors))
    session = NativeSession(native, path)
    with pytest.raises(NativeError, match=r"in onnxruntime|came with the shape \(1, 10\)"):
        session.infer({"x": picture()})
    session.close()


def test_another_profile_and_a_missing_library_are_refused(native: Native, tmp_path: Path) -> None:
    path = write_network(tmp_path / "e", single_network())
    with pytest.raises(NativeError, match=r"is for orin-nano-8gb, this device is thor"):
        NativeSession(native, path, profile="thor")
    with pytest.raises(
        NativeError, match=r"portable: onnxruntime cannot be loaded: .*nowhere.* is its path"
    ):
        NativeSession(native, path, library=tmp_path / "nowhere.so")


def test_verdicts_on_damaged_files_are_those_of_the_python_reader(
    native: Native, tmp_path: Path
) -> None:
    compare_verdicts(native, tmp_path, range(300))


@pytest.mark.slow
def test_verdicts_on_20_000_damaged_files_are_those_of_the_python_reader(
    native: Native, tmp_path: Path
) -> None:
    compare_verdicts(native, tmp_path, range(20_000))


def python_verdict(path: Path) -> str:
    try:
        with open_engine(path) as engine:
            engine.verify()
    except EngineError as error:
        return str(error)
    return "valid"


def test_a_name_of_several_lines_is_quoted_in_one(native: Native, tmp_path: Path) -> None:
    path = tmp_path / "e"
    header = b'{"a\\nb\\u007f":{}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    assert "entry 'a\\x0ab\\x7f' has not just dtype" in native.verdict(path)


def compare_verdicts(native: Native, folder: Path, seeds: range) -> None:
    path, bases = folder / "e", mutant_bases(folder)
    valid = 0
    for seed in seeds:
        path.write_bytes(mutated(seed, bases))
        sentence, reference = native.verdict(path), python_verdict(path)
        assert (sentence == "valid") == (reference == "valid"), f"{seed}: {sentence}; {reference}"
        assert sentence == "valid" or sentence.startswith(str(path))
        assert "\n" not in sentence
        valid += sentence == "valid"
    assert 0.03 * len(seeds) < valid < 0.5 * len(seeds)


@pytest.mark.parametrize("kind", ["missing", "empty", "folder", "fifo"])
def test_what_is_no_file_is_refused(native: Native, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "e"
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    assert native.verdict(path).startswith(str(path))


def test_a_flipped_byte_is_found_when_its_section_is_read(native: Native, tmp_path: Path) -> None:
    path = write_network(tmp_path / "e", single_network())
    data = bytearray(path.read_bytes())
    data[random.Random(3).randrange(len(data) - 100, len(data))] ^= 4
    path.write_bytes(data)
    with pytest.raises(NativeError, match=r"is damaged: section '.*' at byte") as caught:
        NativeSession(native, path)
    assert caught.value.status == 1


# -- on the GPU, in a process of its own: whoever loads libcuda afterwards gets the shim ---------


def check_kernels(library: Path, folder: Path) -> None:
    """Results, and what is taken and given back, on the double of the driver."""
    rng = np.random.default_rng(5)
    model = small_convnet(folder / "m.onnx", rng)
    with cuda_double.interpreted_cubins():
        build_engine(model, "orin-nano-8gb", folder / "e", BuildOptions(precision="fp16"))
    x = rng.normal(size=(1, 3, 32, 32)).astype(np.float32)
    with cuda_double.installed() as gpu:
        connect(compiled_shim(folder), gpu)
        native = Native(library)
        with open_session(folder / "e") as reference:
            expected = reference.infer({"x": x})["y"]
        session = NativeSession(native, folder / "e")
        assert [kind for _, kind, _ in session.reports()] == ["cuda"]
        gpu.calls.clear()
        assert session.infer({"x": x})["y"].tobytes() == expected.tobytes()
        assert "cuGraphLaunch" in gpu.calls
        assert "cuLaunchKernel" not in gpu.calls  # they were captured when it was loaded
        output = np.zeros_like(expected)
        for array in (x, output):  # the double knows only memory that was taken from it
            gpu.memory[array.ctypes.data] = array.view(np.uint8).reshape(-1)
        session.infer_on_stream({"x": x}, {"y": output})
        gpu.settle()
        assert output.tobytes() == expected.tobytes()
        gpu.calls.clear()
        session.infer_on_stream({"x": x}, {"y": output})  # may be on another stream
        session.infer({"x": x})
        fences = [call for call in gpu.calls if "Event" in call]
        assert fences == ["cuStreamWaitEvent", "cuEventRecord", "cuEventSynchronize"]
        with pytest.raises(NativeError, match="output 'y' has no array"):
            session.infer_on_stream({"x": x}, {})
        for array in (x, output):
            del gpu.memory[array.ctypes.data]
        session.close()
        assert not any((gpu.memory, gpu.graphs, gpu.kernels)), "something was not given back"
        cuda_double._ATTRIBUTES[cuda_double.cuda_driver.COMPUTE_MINOR] = 9
        session = NativeSession(native, folder / "e")
        ((_, kind, reason),) = session.reports()
        assert kind == "portable"
        assert "cuda: its kernels are for sm_87, this GPU is sm_89" in reason
        session.close()


def test_kernels_give_what_the_python_session_gives(native: Native, tmp_path: Path) -> None:
    command = [sys.executable, __file__, native.path, tmp_path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]


def test_the_example_finds_the_classes_that_python_finds(
    native: Native, tmp_path: Path, rng: np.random.Generator
) -> None:
    program = tmp_path / "classify"
    source = NATIVE / "examples/classify.cpp"
    command = ["g++", "-std=c++17", "-Wall", "-Werror", f"-I{NATIVE}/include", source]
    command += [native.path, f"-Wl,-rpath,{native.path.parent}", "-o", program]
    subprocess.run(command, check=True)
    engine = write_network(tmp_path / "e", single_network())
    pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
    (tmp_path / "p.rgb").write_bytes(pixels.tobytes())
    library = next(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so*"))
    run = subprocess.run(
        [program, engine, tmp_path / "p.rgb", library], capture_output=True, text=True, check=True
    )
    with open_session(engine) as session:
        x = (pixels.astype(np.float32) / np.float32(255)).transpose(2, 0, 1)[None]
        scores = session.infer({"x": np.ascontiguousarray(x)})["y"][0]
    classes = [int(line.split()[0]) for line in run.stdout.splitlines()[1:]]
    assert classes == list(np.argsort(-scores, kind="stable")[:5])


# -- other ways to build it ----------------------------------------------------------------------


def verdicts_of(command: list[object], folder: Path, seeds: range) -> list[str]:
    """The sentences of a program on damaged files; "valid" for those that are."""
    bases, paths = mutant_bases(folder), [folder / f"e{seed}" for seed in seeds]
    for path, seed in zip(paths, seeds, strict=True):
        path.write_bytes(mutated(seed, bases))
    names = "".join(f"{path}\n" for path in paths)
    run = subprocess.run(
        list(map(str, command)), input=names, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
    lines = run.stdout.splitlines()
    assert len(lines) == len(paths)
    for path, line in zip(paths, lines, strict=True):
        assert (line == "valid") == (python_verdict(path) == "valid")
    return lines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiler", "flags", "runner"),
    [
        ("g++", ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover"), ()),
        ("aarch64-linux-gnu-g++", ("-O1", "-static"), ("qemu-aarch64-static",)),
    ],
    ids=["sanitizers", "aarch64"],
)
def test_another_build_has_the_same_verdicts(
    compiler: str, flags: tuple[str, ...], runner: tuple[str, ...], tmp_path: Path
) -> None:
    if shutil.which(compiler) is None or not all(map(shutil.which, runner)):
        pytest.skip(f"{compiler} or {' '.join(runner)} is not installed")
    sources = [*sorted((NATIVE / "src").glob("*.cpp"))]
    program, c_object = tmp_path / "verdicts", tmp_path / "verdicts.o"
    include = f"-I{NATIVE}/include"
    c_compiler = compiler.replace("g++", "gcc")
    verdicts = ROOT / "tests/fixtures/native_verdicts.c"
    strict = ("-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror")
    subprocess.run([c_compiler, *strict, include, "-c", verdicts, "-o", c_object], check=True)
    xxhash = ("-idirafter", "/usr/include") if runner else ()
    command = [compiler, "-std=gnu++17", *flags, include, *xxhash, *sources, c_object, "-ldl"]
    subprocess.run([*command, "-o", program], check=True)
    verdicts_of([*runner, program], tmp_path, range(2000))


def compiled_program(folder: Path, source: Path, *flags: str) -> Path:
    """Compile a program of tests with all of the library."""
    joined, program = folder / "library.cpp", folder / source.stem
    sources = sorted((NATIVE / "src").glob("*.cpp"))
    joined.write_text("".join(f'#include "{one}"\n' for one in sources))
    command = ["g++", "-O1", "-g", "-std=gnu++17", f"-I{NATIVE}/include", *flags]
    libraries = ["-ldl", "-pthread", "-o", str(program)]
    joint = [*command, "-Wno-subobject-linkage", str(joined), "-x"]
    language = "c" if source.suffix == ".c" else "c++"
    subprocess.run([*joint, language, str(source), *libraries], check=True)
    return program


def driver_double(folder: Path) -> dict[str, str]:
    """Compile the double of libcuda in C; return the environment in which it is loaded."""
    command = ["gcc", "-g", "-shared", "-fPIC", str(NATIVE / "tests/cuda_double.c")]
    subprocess.run([*command, "-o", str(folder / "libcuda.so.1")], check=True)
    return os.environ | {"LD_LIBRARY_PATH": str(folder)}


def kernel_engine(folder: Path, batch: int | str) -> bytes:
    """A small engine with kernels for sm_87, without checksums."""
    nodes = [node("Conv", ("x", "w"), "c"), node("Relu", ("c",), "y")]
    shapes = ([batch, 3, 4, 4], [batch, 4, 4, 4])
    infos = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in zip("xy", shapes, strict=True)
    ]
    weights = onnx.numpy_helper.from_array(np.ones((4, 3, 1, 1), np.float32), "w")
    graph = onnx.helper.make_graph(nodes, "g", infos[:1], infos[1:], [weights])
    model = onnx.helper.make_model(graph, opset_imports=OPSET, ir_version=9)
    onnx.save(model, folder / "m.onnx")
    dims = () if isinstance(batch, int) else (DimRange(name=batch, min=1, opt=2, max=4),)
    with cuda_double.interpreted_cubins():
        options = BuildOptions(precision="fp16", dims=dims, fallback=False)
        build_engine(folder / "m.onnx", "orin-nano-8gb", folder / "k", options)
    return without_checksums((folder / "k").read_bytes())


def session_program(folder: Path, *flags: str) -> tuple[list[list[str]], dict[str, str]]:
    """The program of sessions in threads, on kernels and on onnxruntime, and its environment."""
    program = compiled_program(folder, NATIVE / "tests/sessions_in_threads.cpp", *flags)
    write_network(folder / "portable", split_network("batch"))
    (folder / "kernels").write_bytes(kernel_engine(folder, "batch"))
    library = next(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so*"))
    engines = (folder / "kernels", folder / "portable")
    return [[str(program), str(one), str(library)] for one in engines], driver_double(folder)


def succeeds(command: list[str], environment: dict[str, str]) -> str:
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, (run.stdout + run.stderr)[-5000:]
    return run.stdout + run.stderr


@pytest.mark.slow
def test_sessions_in_threads_have_no_data_race(tmp_path: Path) -> None:
    commands, environment = session_program(tmp_path, "-fsanitize=thread")
    # onnxruntime is compiled without the sanitizer, which does not see all of its synchronization.
    (tmp_path / "known").write_text("race:libonnxruntime.so\n")
    environment["TSAN_OPTIONS"] = f"suppressions={tmp_path / 'known'}"
    for command in commands:
        assert succeeds(command, environment).splitlines() == ["12 sessions agree"]


KNOWN_TO_VALGRIND = """{
  the words that the loader of glibc compares
  Memcheck:Addr8
  fun:strncmp
  fun:is_dst
  ...
}
{
  onnxruntime
  Memcheck:Overlap
  fun:__memcpy_chk
  obj:*/libonnxruntime.so*
  ...
}
"""


@pytest.mark.slow
def test_valgrind_finds_no_error_and_no_leak(tmp_path: Path) -> None:
    if shutil.which("valgrind") is None:
        pytest.skip("valgrind is not installed")
    (tmp_path / "known").write_text(KNOWN_TO_VALGRIND)
    words = ("--quiet", "--leak-check=full", "--errors-for-leak-kinds=definite,possible")
    checked = ["valgrind", *words, "--error-exitcode=9", f"--suppressions={tmp_path / 'known'}"]
    commands, environment = session_program(tmp_path)
    for command in commands:
        assert succeeds([*checked, *command], environment).splitlines() == ["12 sessions agree"]
    program = compiled_program(tmp_path, ROOT / "tests/fixtures/native_verdicts.c")
    verdicts_of([*checked, program], tmp_path, range(50))


def fuzz(folder: Path, target: str, engines: list[bytes]) -> str:
    """Build a target of libFuzzer with its sanitizers, run it 2,000 times; return what it says."""
    if shutil.which("clang++") is None:
        pytest.skip("clang is not installed")
    corpus, build = folder / "corpus", folder / "build"
    corpus.mkdir()
    for index, data in enumerate(engines):
        (corpus / str(index)).write_bytes(data)
    options = [
        f"-DCMAKE_{language}_COMPILER=clang{end}" for language, end in (("C", ""), ("CXX", "++"))
    ]
    options += ["-DTANDEM_FUZZ=ON", "-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_UNITY_BUILD_BATCH_SIZE=0"]
    # So few runs take less time than to optimize what is run.
    options += ["-DCMAKE_CXX_FLAGS_RELEASE=-O0"]
    succeeds(["cmake", "-S", str(NATIVE), "-B", str(build), *options], dict(os.environ))
    succeeds(["cmake", "--build", str(build), "--target", target], dict(os.environ))
    words = ["-runs=2000", "-seed=1", "-max_len=16384", f"-artifact_prefix={folder}/"]
    return succeeds([str(build / target), *words, str(corpus)], dict(os.environ))


@pytest.mark.slow
def test_a_short_run_of_the_fuzzer_finds_nothing(tmp_path: Path) -> None:
    engines = [*mutant_bases(tmp_path), *(kernel_engine(tmp_path, size) for size in (1, "n"))]
    engines += [path.read_bytes() for path in (ROOT / "tests/data/formats").glob("*.engine")]
    engines += [mutated(seed, engines) for seed in range(100)]
    assert "Done 2000 runs" in fuzz(tmp_path, "fuzz_engine", engines)


def test_stages_take_arrays_of_any_shape_and_values(tmp_path: Path) -> None:
    assert "Done 2000 runs" in fuzz(tmp_path, "fuzz_stages", [])


@pytest.mark.slow
def test_the_commands_of_the_page_build_it_and_a_project_finds_it(tmp_path: Path) -> None:
    page = (ROOT / "docs/cpp.md").read_text()
    commands, program = re.findall(r"```\w*\n(.*?)```", page, re.DOTALL)
    (tmp_path / "device").symlink_to(ROOT / "device")
    for command in commands.splitlines():
        subprocess.run(command.split(), cwd=tmp_path, check=True)
    (tmp_path / "app.cpp").write_text(program)
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(app CXX)\nfind_package(tandem 1 REQUIRED)\n"
        "add_executable(app app.cpp)\ntarget_link_libraries(app tandem::tandem)\n"
    )
    prefix = f"-DCMAKE_PREFIX_PATH={tmp_path}/build/prefix"
    for command in (f"cmake -S . -B out {prefix}", "cmake --build out"):
        subprocess.run(command.split(), cwd=tmp_path, check=True)
    pkg_config = os.environ | {"PKG_CONFIG_PATH": f"{tmp_path}/build/prefix/lib/pkgconfig"}
    prefixes = subprocess.run(
        ["pkg-config", "--variable=prefix", "tandem"], env=pkg_config, capture_output=True,
        text=True, check=True,
    ).stdout  # fmt: skip
    assert Path(prefixes.strip()).resolve() == (tmp_path / "build/prefix").resolve()
    run = subprocess.run(["out/app"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr == "model.engine cannot be read: No such file or directory\n"


if __name__ == "__main__":
    check_kernels(*map(Path, sys.argv[1:]))
