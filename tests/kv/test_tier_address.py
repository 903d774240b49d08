"""Addresses of a remote tier: no message says a piece of a password."""

from __future__ import annotations

import re
import traceback

import pytest

from kvgraph.errors import StoreError
from kvgraph.kv.tiers.address import MOST_SAID, require_address, said, server_of


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:secret/x@host:6379",
        "redis://:secret/word@host",
        "redis://:secret#word@host:6379",
        "redis://user:secret?word@host:6379",
        "redis://user:123#secret@host:6379",
        "redis://user:6390/secret@host:1",
        "redis://user:secret",
        "redis://user:1@[secret",
        "unix://user:secret/x@/run/redis.sock",
        "redis:secret@host",
        "unix:secret@/run/redis.sock",
        "secret@host:6379",
        "//user:secret@host",
    ],
)
def test_a_password_that_is_not_escaped(url: str) -> None:
    with pytest.raises(StoreError, match=r"^remote tier: expected an address such as") as caught:
        require_address(url)
    assert "secret" not in "".join(traceback.format_exception(caught.value)[-2:])
    assert caught.value.__context__ is None
    assert server_of(url) == "a server"


@pytest.mark.parametrize("option", ["retry=3", "decode_responses=1", "socket_timeout=1", "cache"])
def test_an_option_that_changes_how_a_tier_connects(option: str) -> None:
    with pytest.raises(StoreError, match=r"option other than db, username, password, client_name"):
        require_address(f"redis://host//[0?db=1&{option}")


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("redis://host/abc", "whose database is no whole number from 0 on"),
        ("redis://host/0/1", "whose database is no whole number from 0 on"),
        ("redis://host/-1", "whose database is no whole number from 0 on"),
        ("redis://host?db=-1", "whose database is no whole number from 0 on"),
        ("unix:///run/redis.sock?db=x", "whose database is no whole number from 0 on"),
        ("redis://host/1?db=2", "with two databases"),
        ("redis://host?client_name=a%20b", "whose client_name has other characters than '!' to"),
        ("redis://host?db=1&db=2", "with an option twice"),
        ("redis://host?client_name=", "whose client_name has other characters than '!' to"),
        ("redis://host/1?ssl_ca_certs=/etc/ca.pem", "with an option ssl_..., which rediss:// "),
        ("unix://", "without the path of a socket; write unix:///run/redis.sock"),
        ("unix://?db=1", "without the path of a socket; write unix:///run/redis.sock"),
    ],
)
def test_a_database_or_a_socket_that_cannot_be_meant(url: str, what: str) -> None:
    with pytest.raises(StoreError, match=rf"redis://host:6379/0, got one {re.escape(what)}"):
        require_address(url)


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("redis://host", "host:6379"),
        ("redis://user:secret@host:7000/2?db=2", "host:7000"),
        ("redis://host/", "host:6379"),
        ("redis://:secret@word@host", "host:6379"),
        ("rediss://us%40er:sec%2Fret@host", "host:6379"),
        ("redis://[::1]:7000", "[::1]:7000"),
        ("rediss://host?username=u&password=secret&ssl_ca_certs=/etc/ca.pem", "host:6379"),
        ("redis://", "a server"),
        ("unix:///run/redis.sock?db=1", "/run/redis.sock"),
        ("unix://user:secret@/run/redis.sock", "/run/redis.sock"),
    ],
)
def test_what_is_said_of_a_server(url: str, server: str) -> None:
    require_address(url)
    assert server_of(url) == server


def test_what_others_said_is_one_line_that_can_be_printed() -> None:
    assert said(" a\n b\x1b[0m\udcff ") == "a b\\x1b[0m\\udcff"
    assert said("\0" * 9999) == ("\\x00" * MOST_SAID)[:MOST_SAID]
