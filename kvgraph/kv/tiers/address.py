"""The address of a remote tier: its format, and its form in messages, without credentials."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlsplit

from kvgraph.errors import StoreError

SCHEMES = ("redis", "rediss", "unix")
DEFAULT_PORT = 6379

OPTIONS = ("db", "username", "password", "client_name")
"""Options that an address may have after '?', besides options that begin with ssl_. Time limits
and retries cannot be set: the tier sets them."""

MOST_SAID = 200
"""Most characters of a server's or a library's message that are passed on."""


def require_address(url: str) -> None:
    """Raise StoreError for a malformed address; the message has no credentials."""
    failed = "remote tier: expected an address such as redis://host:6379/0, got one "
    scheme, authority, behind = _parts(url)
    if scheme not in SCHEMES:
        raise StoreError(f"{failed}that does not begin with redis://, rediss:// or unix://")
    if "@" in behind:
        raise StoreError(
            f"{failed}with '@' behind its host; in a name, a password or a path write '@' as %40, "
            "'/' as %2F, '?' as %3F and '#' as %23"
        )
    if scheme != "unix" and _host_and_port(authority) is None:
        raise StoreError(f"{failed}whose host or port is malformed")
    path, _, query = behind.partition("#")[0].partition("?")
    given = parse_qsl(query, keep_blank_values=True)
    options = dict(given)
    if len(given) > len(options):
        raise StoreError(f"{failed}with an option twice")
    if any(name not in OPTIONS and not name.startswith("ssl_") for name in options):
        raise StoreError(f"{failed}with an option other than {', '.join(OPTIONS)} and ssl_...")
    if scheme != "rediss" and any(name.startswith("ssl_") for name in options):
        raise StoreError(f"{failed}with an option ssl_..., which rediss:// alone has")
    if scheme == "unix" and not path.strip("/") and not authority:
        raise StoreError(f"{failed}without the path of a socket; write unix:///run/redis.sock")
    if not re.fullmatch(r"[!-~]+", options.get("client_name", "kvgraph")):
        raise StoreError(f"{failed}whose client_name has other characters than '!' to '~'")
    databases = [options["db"]] if "db" in options else []
    databases += [path.strip("/")] if scheme != "unix" and path.strip("/") else []
    if not all(re.fullmatch(r"[0-9]{1,9}", database) for database in databases):
        raise StoreError(f"{failed}whose database is no whole number from 0 on")
    if len(set(databases)) > 1:
        raise StoreError(f"{failed}with two databases")


def server_of(url: str) -> str:
    """Host and port, or socket path, of an address for messages, without credentials."""
    scheme, authority, behind = _parts(url)
    if scheme not in SCHEMES or "@" in behind:
        return "a server"
    own = authority.rpartition("@")[2]
    if scheme == "unix":
        return said(own + re.split(r"[?#]", behind)[0]) or "a server"
    host, port = _host_and_port(authority) or ("", None)
    if not host:
        return "a server"
    host = f"[{host}]" if ":" in host else host
    return said(f"{host}:{DEFAULT_PORT if port is None else port}")


def said(what: object) -> str:
    """A foreign message as one line, cut to MOST_SAID characters; unprintable ones are escaped."""
    line = " ".join(str(what).split())[:MOST_SAID]
    escaped = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return "".join(escaped)[:MOST_SAID]


def _parts(url: str) -> tuple[str, str, str]:
    """Scheme, authority, and the text after the authority; the scheme is empty without `://`."""
    scheme, mark, rest = url.partition("://")
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    return (scheme if mark else ""), authority, rest[len(authority) :]


def _host_and_port(authority: str) -> tuple[str, int | None] | None:
    """Host and port; None if malformed, since urllib's error text may hold a part of a password."""
    try:
        parts = urlsplit(f"redis://{authority}")
        return parts.hostname or "", parts.port
    except ValueError:
        return None
