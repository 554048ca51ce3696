"""Build engines of a Triton repository."""

from dataclasses import asdict

from toolkit.cli.actions.outputs import print_result
from toolkit.cli.commands.import_triton import ImportTriton
from toolkit.engine.build import BuildOptions
from toolkit.triton_repository import import_triton as import_repository


def import_triton(options: ImportTriton) -> None:
    """Write the repository and say what serves each version. Raises TandemError."""
    rows = import_repository(
        options.repository,
        options.output,
        options.profile,
        BuildOptions(precision=options.precision),
    )
    lines = [f"wrote {options.output}"]
    for row in rows:
        text = f"  {row.model} version {row.version}: {row.file or 'left out'}"
        lines.append(f"{text} ({row.note})" if row.note else text)
    print_result([asdict(row) for row in rows], "\n".join(lines), as_json=options.as_json)
