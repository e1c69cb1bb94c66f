# SPDX-License-Identifier: Apache-2.0
"""A changed web configuration or certificate is served by; a bad one is not, and that is said."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import ssl
from pathlib import Path

import pytest
from gpulock_exporter.web.server import WebSettings
from gpulock_exporter.webconfig import reload
from gpulock_exporter.webconfig.config import WebConfigError, WebConfigFiles, load_web_config
from gpulock_exporter.webconfig.reload import Reloader

from tests.exporter.certificates import make_authority, make_certificate, trusting
from tests.exporter.inprocess import running
from tests.exporter.wire import SOUND, dial, exchange
from tests.support.faults import raising
from tests.support.wait import wait_until

TLS = "tls_server_config:\n  cert_file: server.pem\n  key_file: server.key\n"
HASH = "$2y$04$abcdefghijklmnopqrstuuKnoBx93AGbHF7nDfU33nIyjyfzG5jKi"
NEWER = "  min_version: TLS13\n"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    authority = make_authority(tmp_path, "ca")
    make_certificate(tmp_path, "server", authority)
    make_certificate(tmp_path, "next", authority)
    path = tmp_path / "web-config.yml"
    path.write_text(TLS)
    return path


def replace(path: Path, text: str) -> None:
    """Replace a file as a careful editor does."""
    beside = path.with_name(".beside")
    beside.write_text(text)
    beside.rename(path)


def test_a_wrong_file_is_refused_at_the_start(config: Path) -> None:
    config.write_text("nonsense: 1\n")
    with pytest.raises(WebConfigError, match=r"web-config\.yml: this file: nonsense"):
        Reloader(str(config), print)


def oldest(settings: WebSettings | None) -> ssl.TLSVersion:
    assert settings is not None
    assert settings.tls is not None
    return settings.tls.minimum_version


def test_a_change_is_seen_whether_written_or_renamed_and_nothing_is_read_without_one(
    config: Path,
) -> None:
    log: list[str] = []
    reloader = Reloader(str(config), log.append)
    served = reloader.settings
    assert reloader.look() is None
    assert reloader.settings is served
    replace(config, TLS + NEWER)
    assert oldest(reloader.look()) is ssl.TLSVersion.TLSv1_3
    config.write_text(TLS)
    assert oldest(reloader.look()) is ssl.TLSVersion.TLSv1_2
    assert reloader.last_reload_successful
    assert log == [f"{config}: reloaded"] * 2


def agree_on_session(config: Path, server: ssl.SSLContext) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Connect as TLS 1.2 without tickets does: a session is kept while the connection lives."""
    context = trusting(config.with_name("ca.pem"))
    context.options |= ssl.OP_NO_TICKET
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    ours, theirs = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = server.wrap_bio(ours, theirs, server_side=True)
    other = context.wrap_bio(theirs, ours, server_hostname="localhost")
    for end in (other, one, other, one):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    return one, other


def test_a_context_that_keeps_many_sessions_goes_alone_and_quietly(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload, "MOST_SESSIONS", 3)
    log: list[str] = []
    replace(config, f"{TLS}basic_auth_users:\n  alice: {HASH}\n")
    reloader = Reloader(str(config), log.append)
    served = reloader.settings
    assert served.tls is not None

    living = [agree_on_session(config, served.tls) for _ in range(3)]
    assert (served.tls.session_stats()["number"], reloader.look()) == (3, None)
    living.append(agree_on_session(config, served.tls))
    renewed = reloader.look()

    assert renewed is not None and renewed.tls is not None
    assert renewed.tls.session_stats()["number"] == 0
    assert renewed.refusal is served.refusal, "whose passwords it knows"
    assert (log, reloader.look()) == ([], None)


def test_a_change_that_comes_with_many_sessions_is_a_whole_reload(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload, "MOST_SESSIONS", 0)
    log: list[str] = []
    reloader = Reloader(str(config), log.append)
    assert reloader.settings.tls is not None
    living = agree_on_session(config, reloader.settings.tls)

    def change_and_load(path: str, files: WebConfigFiles) -> tuple[WebSettings, list[str]]:
        replace(config, f"{TLS}basic_auth_users:\n  alice: {HASH}\n")
        return load_web_config(path, files)

    monkeypatch.setattr(reload, "load_web_config", change_and_load)
    renewed = reloader.look()

    assert living and renewed is not None and renewed.refusal is not None
    assert log == [f"{config}: reloaded"]


def test_a_bad_change_keeps_the_old_one_and_says_so_once(config: Path) -> None:
    log: list[str] = []
    reloader = Reloader(str(config), log.append)
    served = reloader.settings
    replace(config, TLS + "rate_limit: {burst: 1}\n")
    assert [reloader.look(), reloader.look()] == [None, None]
    assert reloader.settings is served
    assert not reloader.last_reload_successful
    assert len(log) == 1
    assert f"not reloaded, the old one stays: {config}: this file: rate_limit" in log[0]
    replace(config, TLS)
    assert reloader.look() is not None
    assert reloader.last_reload_successful


def test_what_failed_for_a_passing_reason_is_tried_again(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    reloader = Reloader(str(config), log.append)
    replace(config, TLS + NEWER)
    with monkeypatch.context() as broken:
        broken.setattr(
            ssl.SSLContext, "load_cert_chain", raising(OSError(errno.EMFILE, "Too many open files"))
        )
        assert [reloader.look(), reloader.look()] == [None, None]
    assert not reloader.last_reload_successful
    assert len(log) == 1
    assert reloader.look() is not None
    assert reloader.last_reload_successful


def test_a_file_that_goes_and_comes_back_is_followed(config: Path) -> None:
    reloader = Reloader(str(config), lambda _: None)
    config.rename(config.with_name("away"))
    assert reloader.look() is None
    assert not reloader.last_reload_successful
    config.with_name("away").rename(config)
    assert reloader.look() is not None
    assert reloader.last_reload_successful


@pytest.mark.parametrize("name", ["server", "later"])
def test_a_certificate_and_its_key_are_served_once_both_are_there(name: str, config: Path) -> None:
    reloader = Reloader(str(config), lambda _: None)
    folder = config.parent
    replace(config, TLS.replace("server.", f"{name}."))  # `later` names what is not there yet
    assert (reloader.look() is None) == (name == "later")
    shutil.copy(folder / "next.pem", folder / f"{name}.pem")
    assert reloader.look() is None
    assert not reloader.last_reload_successful
    shutil.copy(folder / "next.key", folder / f"{name}.key")
    assert reloader.look() is not None
    assert reloader.last_reload_successful


def test_a_certificate_behind_a_link_is_followed(config: Path) -> None:
    # As Kubernetes and certbot do it: the path stays, what it leads to changes.
    folder = config.parent
    for kind in ("pem", "key"):
        (folder / f"server.{kind}").rename(folder / f"first.{kind}")
        (folder / f"server.{kind}").symlink_to(f"first.{kind}")
    reloader = Reloader(str(config), lambda _: None)
    for kind in ("pem", "key"):
        (folder / f"link.{kind}").symlink_to(f"next.{kind}")
        os.replace(folder / f"link.{kind}", folder / f"server.{kind}")
    assert reloader.look() is not None


def test_a_server_serves_the_new_certificate_and_drops_no_request(config: Path) -> None:
    folder = config.parent
    log: list[str] = []
    reloader = Reloader(str(config), log.append)

    def name(port: int) -> object:
        with dial(port, trusting(folder / "ca.pem")) as one:
            assert isinstance(one, ssl.SSLSocket)
            certificate = one.getpeercert()  # before the server closes: 3.13 knows none then
            assert exchange(one, SOUND)[0].startswith(b"HTTP/1.0 200 ")
            assert certificate is not None
            return certificate["subject"]

    with running(settings=reloader.settings) as server:
        reloader.start(server.server.adopt, 0.02)
        assert name(server.port) == ((("commonName", "server"),),)
        shutil.copy(folder / "next.pem", folder / "server.pem")
        shutil.copy(folder / "next.key", folder / "server.key")
        wait_until(
            lambda: name(server.port) == ((("commonName", "next"),),), why="the next certificate"
        )
        replace(config, "nonsense: 1\n")
        wait_until(lambda: not reloader.last_reload_successful, why="a reload that fails")
        assert name(server.port) == ((("commonName", "next"),),)
        reloader.stop()


def test_a_file_that_is_being_written_in_its_place_opens_the_exporter_to_nobody(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editor empties it first, and an empty file is one without TLS and without passwords."""
    reloader = Reloader(str(config), lambda _: None)
    served = reloader.settings

    def load_half(path: str, files: WebConfigFiles) -> tuple[WebSettings, list[str]]:
        monkeypatch.setattr(reload, "load_web_config", load_web_config)
        loaded = load_web_config(path, files)
        config.write_text(TLS + NEWER)
        return loaded

    monkeypatch.setattr(reload, "load_web_config", load_half)
    config.write_text("")
    assert (reloader.look(), reloader.settings) == (None, served)
    assert reloader.last_reload_successful
    assert oldest(reloader.look()) is ssl.TLSVersion.TLSv1_3


def test_a_pipe_in_place_of_a_file_does_not_hold_up_the_reload(config: Path) -> None:
    adopted: list[WebSettings] = []
    reloader = Reloader(str(config), lambda _: None)
    reloader.start(adopted.append, 0.02)
    config.unlink()
    os.mkfifo(config)
    wait_until(lambda: not reloader.last_reload_successful, why="a reload that fails")
    replace(config, TLS)
    wait_until(lambda: len(adopted) == 1, why="other settings")
    reloader.stop()
