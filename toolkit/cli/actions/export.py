"""Write an engine as files for NVIDIA's own tools."""

from dataclasses import asdict

from device.profile import load_profile
from toolkit.cli.actions.outputs import print_result
from toolkit.cli.commands.export import Export as Options
from toolkit.export.folder import Export, as_builtins, export_trtexec
from toolkit.export.triton import export_triton


def export(options: Options) -> None:
    """Write the folder and print what is in it. Raises TandemError."""
    if options.to == "triton":
        model = export_triton(options.engine, options.output)
        lines = [f"wrote {model.folder}, max_batch_size {model.max_batch_size}"]
        lines += [f"  no scripts for TensorRT: {model.problem}"] if model.problem else []
        print_result(asdict(model), "\n".join(lines), as_json=options.as_json)
        return
    profile = load_profile(options.profile) if options.profile is not None else None
    result = export_trtexec(options.engine, options.output, profile)
    print_result(as_builtins(result), _text(result), as_json=options.as_json)


def _text(result: Export) -> str:
    lines = [f"wrote {result.folder} for {result.profile}"]
    for era in result.eras:
        if era.problem:
            lines.append(f"  no {era.era} export: {era.problem}")
        for row in era.recipes:
            name = f"TensorRT {row.release.version} (JetPack {row.release.jetpack})"
            if row.problem:
                lines.append(f"  not for {name}: {row.problem}")
                continue
            lines.append(f"  {era.era}/trtexec-{row.release.version}.sh: {name}")
            lines += [f"    note: {note}" for note in row.notes]
    return "\n".join(lines)
