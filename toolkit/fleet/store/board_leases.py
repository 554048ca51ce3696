"""The lease of a board: one run of a farm at a time gives it jobs."""

from toolkit.fleet.store.database import Database


def lease_board(database: Database, board: str, holder: str, for_s: float) -> bool:
    """Take or renew the lease of a board for so many seconds; False if another run has it."""
    with database.write():
        changed = database.run(
            "INSERT INTO board_leases VALUES (?, ?, ?) ON CONFLICT (board) DO UPDATE SET"
            " holder = excluded.holder, until_s = excluded.until_s"
            " WHERE board_leases.holder = excluded.holder OR board_leases.until_s < ?",
            board, holder, database.now_s() + for_s, database.now_s(),
        )  # fmt: skip
        return changed == 1


def release_board(database: Database, board: str, holder: str) -> None:
    """Give the lease of a board back."""
    with database.write():
        database.run("DELETE FROM board_leases WHERE board = ? AND holder = ?", board, holder)
