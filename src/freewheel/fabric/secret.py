"""The secret of a run: everybody in it has it, nobody sends it.

Whoever starts a run makes or is given one, and hands it to its workers by their environment, which only their
own user can read. Seals and proofs are derived from it, by HMAC-SHA256 and, for frames, by keyed BLAKE2:

- an entry of the store carries a seal over its name and text, so that nobody else can write there;
- two workers prove to each other that they have it before either says anything else (fabric/handshake.py);
- every frame is sealed with a key of its connection and the number of frames before it, so that none can be
  changed, repeated, moved or brought in from elsewhere. Vectors are not: for that there is TLS.
"""

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from freewheel.errors import ConfigError

# In the environment: the secret itself, as our launcher hands it on; or the file that has it.
SECRET, SECRET_FILE = "FREEWHEEL_SECRET", "FREEWHEEL_SECRET_FILE"
SHORTEST = 16
SEAL_BYTES = 16


class Forged(ConfigError):
    """An entry of the store without a seal of this run's secret."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the rendezvous's entry {name!r} is not sealed with this worker's secret. Give all the same "
            f"secret ({SECRET_FILE}, or --secret), or look who else writes there."
        )


def derive(key: bytes, *words: str | bytes) -> bytes:
    """A key or a proof that needs `key` to be made; no two lists of words give the same."""
    parts = [word.encode() if isinstance(word, str) else word for word in words]
    return hmac.digest(key, b"".join(len(part).to_bytes(8, "big") + part for part in parts), "sha256")


def seal(key: bytes, name: str, text: str) -> str:
    return derive(key, "entry", name, text).hex() + text


def unseal(key: bytes, name: str, entry: bytes) -> str:
    """The text; Forged unless it was sealed with this key, under this name."""
    mark, text = entry[:64], entry[64:]
    if not hmac.compare_digest(mark, derive(key, "entry", name, text).hex().encode()):
        raise Forged(name)
    return text.decode()


class Seals:
    """Seals the frames of one direction of a connection, each with the number of those before it."""

    def __init__(self, key: bytes) -> None:
        self._key, self._before = key, 0

    def next(self, data: bytes | bytearray) -> bytes:
        number = self._before.to_bytes(16, "big")  # a salt: BLAKE2 is its own HMAC, and quicker
        self._before += 1
        return hashlib.blake2b(data, key=self._key, salt=number, digest_size=SEAL_BYTES).digest()


# -- where it comes from --


def make() -> bytes:
    return secrets.token_bytes(32)


def of_text(text: str, where: str) -> bytes:
    """64 hex digits as they are; any other text is hashed."""
    words = text.strip()
    if len(words) < SHORTEST:
        raise ConfigError(
            f"{where} has {len(words)} characters; a secret needs at least {SHORTEST}. Make one with "
            "`openssl rand -hex 32`."
        )
    try:
        given = bytes.fromhex(words)
    except ValueError:
        given = b""
    return given if len(given) == 32 else hashlib.sha256(words.encode()).digest()


def read(path: Path) -> bytes:
    """ConfigError if others than the file's owner could have read it."""
    try:
        with path.open() as file:
            about = os.fstat(file.fileno())
            own = stat.S_ISREG(about.st_mode) and about.st_uid in (os.getuid(), 0)
            if not own or about.st_mode & 0o077:
                raise ConfigError(
                    f"others can read the secret {str(path)!r} (mode {about.st_mode & 0o777:o}): "
                    f"copy it into a file of yours and chmod 600 that, or better make a new one."
                )
            return of_text(file.read(4096), f"the secret {str(path)!r}")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"cannot read the secret {str(path)!r}: {why}. Give the file of the run.") from None


def write(path: Path, secret: bytes) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secret.hex() + "\n")


def of_keys(folder: Path) -> bytes:
    """A secret made of a set of TLS keys: who has the keys has it."""
    try:
        return derive(b"", "secret", (folder / "worker.key").read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read the keys in {str(folder)!r}: {error.strerror}.") from None


def of_environment(environment: Mapping[str, str]) -> bytes:
    """A worker's secret; empty if it was given none."""
    if environment.get(SECRET):
        return of_text(environment[SECRET], SECRET)
    return read(Path(environment[SECRET_FILE])) if environment.get(SECRET_FILE) else b""
