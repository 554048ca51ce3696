"""Whether the servers that share a store have one folder, and not copies of it."""

import secrets
from pathlib import Path

from device.files import replace_file
from toolkit.errors import RolloutError
from toolkit.fleet.store.database import Database

FILE = ".servers"  # a number that the first server writes anew, here and into the store
SETTING = "folder"


def check_folder(folder: Path, database: Database, servers: int) -> None:
    """Raise RolloutError if a server that joins others has another folder than they. `servers`:
    how many share the store."""
    path = folder / FILE
    with database.write():
        rows = database.rows("SELECT value FROM settings WHERE name = ?", SETTING)
        if servers > 1 and rows:
            number = path.read_text().strip() if path.is_file() else "nothing"
            if number == str(rows[0][0]):
                return
            raise RolloutError(
                f"{path} has {number}, and the folder of the fleet's other servers {rows[0][0]}: "
                "give all the same folder, on a network file system; a copy lacks what comes later"
            )
        number = str(secrets.randbits(62))
        database.run(
            "INSERT INTO settings VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET"
            " value = excluded.value",
            SETTING, int(number),
        )  # fmt: skip
        replace_file(path, number.encode())
