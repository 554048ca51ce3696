"""Who may use the fleet's page and API: people with passwords, their sessions, tokens of programs.

Passwords are kept as scrypt hashes, sessions and tokens as SHA-256 of what their holders have: a
copy of the store opens nothing.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Literal, get_args

from toolkit.errors import RolloutError
from toolkit.fleet.store.database import Database

Role = Literal["viewer", "operator", "approver"]
ROLES: tuple[Role, ...] = get_args(Role)  # each may do what those before it may
MIN_PASSWORD, MAX_PASSWORD = 10, 200  # characters
SESSION_S = 12 * 3600.0
MAX_NAME = 64

# Cost of scrypt: 2^15 blocks of 8 x 128 bytes (32 MiB), as OWASP's password storage page has it.
_SCRYPT_N, _SCRYPT_R, _SCRYPT_P = 1 << 15, 8, 3
_SCRYPT_MEMORY = 64 << 20  # bytes that OpenSSL may use


@dataclass(frozen=True, slots=True)
class Account:
    """A person (`kind` "person") or a program with a token ("token")."""

    name: str
    role: Role
    kind: Literal["person", "token"] = "person"

    def may(self, role: Role) -> bool:
        """Whether the account has a role, or one above it."""
        return ROLES.index(self.role) >= ROLES.index(role)


@dataclass(frozen=True, slots=True)
class Session:
    """A person who has signed in. `csrf`: the token that each of the session's forms carries."""

    account: Account
    csrf: str


def hash_password(password: str) -> str:
    """Return `scrypt$salt$hash` of a password, in hexadecimal. It takes about 0.1 s of CPU."""
    salt = secrets.token_bytes(16)
    return f"scrypt${salt.hex()}${_scrypt(password, salt).hex()}"


def check_password(password: str, hashed: str) -> bool:
    """Whether a password is the one that was hashed."""
    _, salt, expected = hashed.split("$")
    return hmac.compare_digest(_scrypt(password, bytes.fromhex(salt)), bytes.fromhex(expected))


def _scrypt(password: str, salt: bytes) -> bytes:
    return hashlib.scrypt(
        password.encode(), salt=salt, n=_SCRYPT_N, r=_SCRYPT_R, p=_SCRYPT_P, maxmem=_SCRYPT_MEMORY
    )


_NO_PASSWORD = f"scrypt${'00' * 16}${'00' * 64}"


def add_account(database: Database, name: str, role: Role, password: str) -> None:
    """Add a person, or give one another role and password: their sessions end.

    Raises RolloutError: the name or the password cannot be used.
    """
    _check_name(name)
    if not MIN_PASSWORD <= len(password) <= MAX_PASSWORD:
        raise RolloutError(
            f"the password has {len(password)} characters: use {MIN_PASSWORD} to {MAX_PASSWORD}"
        )
    hashed = hash_password(password)
    with database.write():
        database.run(
            "INSERT INTO accounts VALUES (?, ?, ?) ON CONFLICT (name) DO UPDATE SET"
            " role = excluded.role, password = excluded.password",
            name, role, hashed,
        )  # fmt: skip
        database.run("DELETE FROM sessions WHERE name = ?", name)


def add_token(database: Database, name: str, role: Role, *, lifetime_s: float) -> str:
    """Add the token of a program, or replace it; return it. Nothing shows it again.

    Raises RolloutError: the name cannot be used.
    """
    _check_name(name)
    token = f"tandem_{secrets.token_urlsafe(32)}"
    with database.write():
        until_s = database.now_s() + lifetime_s
        database.run("DELETE FROM tokens WHERE name = ?", name)
        database.run("INSERT INTO tokens VALUES (?, ?, ?, ?)", _digest(token), name, role, until_s)
    return token


def remove_account(database: Database, name: str) -> None:
    """Remove a person with all sessions, or a token. Raises RolloutError: there is none."""
    with database.write():
        count = sum(
            database.run(f"DELETE FROM {table} WHERE name = ?", name)
            for table in ("accounts", "tokens", "sessions")
        )
    if not count:
        names = ", ".join(account.name for account in load_accounts(database)) or "none yet"
        raise RolloutError(f"nobody is called {name!r}: the accounts are {names}")


def load_accounts(database: Database) -> list[Account]:
    """Return people and tokens, by their names."""
    people = database.rows("SELECT name, role FROM accounts ORDER BY name")
    tokens = database.rows(
        f"SELECT name, role FROM tokens WHERE until_s > {database.dialect.now_s} ORDER BY name"
    )
    return [
        *(Account(name, role) for name, role in people),
        *(Account(name, role, "token") for name, role in tokens),
    ]


def hash_of(database: Database, name: str) -> str:
    """Return the hash of a person's password; of an unknown name one that no password has, so that
    the answer takes as long."""
    rows = database.rows("SELECT password FROM accounts WHERE name = ?", name)
    return str(rows[0][0]) if rows else _NO_PASSWORD


def open_session(database: Database, name: str) -> str:
    """Begin a session of a person; return what its cookie holds."""
    secret = secrets.token_urlsafe(32)
    with database.write():
        now_s = database.now_s()
        database.run("DELETE FROM sessions WHERE until_s <= ?", now_s)
        database.run(
            "INSERT INTO sessions VALUES (?, ?, ?, ?)",
            _digest(secret), name, secrets.token_urlsafe(24), now_s + SESSION_S,
        )  # fmt: skip
    return secret


def load_session(database: Database, secret: str) -> Session | None:
    """Return the session of a cookie, None if it has ended or never was."""
    rows = database.rows(
        "SELECT accounts.name, accounts.role, sessions.csrf FROM sessions JOIN accounts ON"
        f" accounts.name = sessions.name WHERE id = ? AND until_s > {database.dialect.now_s}",
        _digest(secret),
    )
    return Session(Account(rows[0][0], rows[0][1]), rows[0][2]) if rows else None


def close_session(database: Database, secret: str) -> None:
    """End a session."""
    with database.write():
        database.run("DELETE FROM sessions WHERE id = ?", _digest(secret))


def load_token(database: Database, token: str) -> Account | None:
    """Return the program that a token is of, None if it has ended or never was."""
    rows = database.rows(
        f"SELECT name, role FROM tokens WHERE id = ? AND until_s > {database.dialect.now_s}",
        _digest(token),
    )
    return Account(rows[0][0], rows[0][1], "token") if rows else None


def load_account(database: Database, name: str) -> Account | None:
    """Return a person by name, None: nobody is called so."""
    rows = database.rows("SELECT name, role FROM accounts WHERE name = ?", name)
    return Account(rows[0][0], rows[0][1]) if rows else None


def _check_name(name: str) -> None:
    if not name.isprintable() or not 1 <= len(name) <= MAX_NAME or name != name.strip():
        raise RolloutError(
            f"{name!r} cannot be the name of an account: use 1 to {MAX_NAME} printable characters"
        )


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
