"""Downloads from servers that are good, bad, slow and hostile; none of them is outside this machine."""

from __future__ import annotations

import hashlib
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import Request

import pytest
from web import Answer, Web, in_turn, item_of, status, web, whole

from yolofleet.storage import fetch as fetch_module
from yolofleet.storage import request
from yolofleet.storage.atomic import exclusive
from yolofleet.storage.fetch import DownloadError, Item, Patience, adopt, fetch
from yolofleet.support.errors import StorageError

BODY = bytes(range(256)) * 400  # 102,400 bytes
IMPATIENT = Patience(timeout_s=0.4, attempts=3, first_wait_s=0.01, longest_wait_s=0.05, lock_s=1.0)


@pytest.fixture
def server() -> Iterator[Web]:
    with web() as state:
        yield state


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "YOLOFLEET_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def get(item: Item, folder: Path, **how: object) -> Path:
    return fetch(item, folder, **{"patience": IMPATIENT, "tell": lambda text: None, **how})  # type: ignore[arg-type]


def refusal(item: Item, folder: Path) -> DownloadError:
    """Fails with an error that says what to do; no file of the name is there."""
    with pytest.raises(DownloadError) as caught:
        get(item, folder)
    assert not (folder / item.name).exists() and not (folder / f".{item.name}.lock").exists()
    assert item.urls[0] in caught.value.hint and str(folder) in caught.value.hint
    assert caught.value.exit_code == 3
    return caught.value


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- as it should be


def test_a_file_comes_whole_once_and_leaves_nothing_beside_it(server, tmp_path):
    item = item_of(BODY, server.put("/file", whole(BODY)))
    told: list[str] = []
    path = get(item, tmp_path / "new" / "folder", tell=told.append)
    assert path.read_bytes() == BODY and names(path.parent) == ["file.bin"]
    assert get(item, path.parent) == path and len(server.asked) == 1
    assert "100.0 KiB" in told[0] and "licence: free for tests" in told[1]


@pytest.mark.parametrize("kind", ["sha256", "sha1", "md5"])
def test_each_kind_of_digest_is_checked(kind, server, tmp_path):
    url = server.put("/file", whole(BODY))
    right = hashlib.new(kind, BODY).hexdigest()
    assert get(item_of(BODY, url, digest=f"{kind}:{right}"), tmp_path).read_bytes() == BODY
    wrong = "0" * len(right)
    said = refusal(item_of(BODY, url, digest=f"{kind}:{wrong}", name="other"), tmp_path).what
    assert right in said and wrong in said
    assert names(tmp_path) == ["file.bin"]


def test_a_size_that_nobody_published_is_the_servers(server, tmp_path):
    url = server.put("/file", whole(BODY))
    assert get(item_of(BODY, url, size=None), tmp_path).read_bytes() == BODY


def test_an_empty_file_is_a_file(server, tmp_path):
    assert get(item_of(b"", server.put("/file", whole(b""))), tmp_path).read_bytes() == b""


def test_without_a_digest_nothing_is_asked(server, tmp_path):
    said = refusal(item_of(BODY, server.put("/file", whole(BODY)), digest=None), tmp_path)
    assert "no published digest" in said.what and not server.asked


def test_a_file_that_is_there_is_checked_and_never_replaced(server, tmp_path):
    item = item_of(BODY, server.put("/file", whole(BODY)))
    for content in (b"short", BODY[:-1] + b"x"):
        (tmp_path / "file.bin").write_bytes(content)
        with pytest.raises(DownloadError, match="published"):
            get(item, tmp_path)
        assert (tmp_path / "file.bin").read_bytes() == content
    assert not server.asked


def test_the_proxy_of_the_environment_is_used(server, tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", server.address)
    server.put("http://files.invalid/file", whole(BODY))
    server.routes["http://files.invalid/file"] = whole(BODY)
    assert get(item_of(BODY, "http://files.invalid/file"), tmp_path).read_bytes() == BODY


# -- interrupted


def test_a_connection_that_breaks_several_times_is_continued_where_it_broke(server, tmp_path):
    cuts = [whole(BODY, upto=upto) for upto in (30_000, 30_000, 60_000, 60_000, 90_000)]
    item = item_of(BODY, server.put("/file", in_turn(*cuts, whole(BODY))))
    assert get(item, tmp_path).read_bytes() == BODY
    wanted = [0, 30_000, 30_000, 60_000, 60_000, 90_000]
    assert server.ranges() == ["", *(f"bytes={n}-" for n in wanted[1:])]


def test_a_server_that_ignores_ranges_starts_again_and_is_believed(server, tmp_path):
    item = item_of(BODY, server.put("/file", in_turn(whole(BODY, upto=30_000), whole(BODY, ranges=False))))
    assert get(item, tmp_path).read_bytes() == BODY
    assert server.ranges() == ["", "bytes=30000-"]


def test_a_server_that_always_breaks_is_given_up_and_what_came_is_kept(server, tmp_path):
    item = item_of(BODY, server.put("/file", whole(BODY, upto=50_000)))
    said = refusal(item, tmp_path)
    assert "50,000 of 102,400 bytes" in said.what and "continues after 48.8 KiB" in said.hint
    assert (tmp_path / ".file.bin.part").read_bytes() == BODY[:50_000]
    server.put("/file", whole(BODY))
    assert get(item, tmp_path).read_bytes() == BODY
    assert server.ranges()[-1] == "bytes=50000-" and names(tmp_path) == ["file.bin"]


def test_a_file_that_changed_on_the_server_is_fetched_from_the_beginning(server, tmp_path):
    old = bytes(len(BODY))
    changed = in_turn(whole(old, upto=40_000, tag='"1"'), whole(BODY, tag='"2"'))
    item = item_of(BODY, server.put("/file", changed))
    assert get(item, tmp_path).read_bytes() == BODY
    assert server.ranges() == ["", "bytes=40000-"]  # If-Range: the tag differs, so all of it came


def test_a_part_of_another_file_is_found_out_by_the_digest(server, tmp_path):
    (tmp_path / ".file.bin.part").write_bytes(bytes(40_000))
    item = item_of(BODY, server.put("/file", whole(BODY)))
    told: list[str] = []
    assert get(item, tmp_path, tell=told.append).read_bytes() == BODY
    assert server.ranges() == ["bytes=40000-", ""]
    assert any("do not fit together" in text for text in told)


def test_a_part_that_is_longer_than_the_file_is_dropped(server, tmp_path):
    (tmp_path / ".file.bin.part").write_bytes(bytes(len(BODY) + 1))
    item = item_of(BODY, server.put("/file", whole(BODY)))
    assert get(item, tmp_path).read_bytes() == BODY and server.ranges() == [""]


def test_a_part_that_the_server_cannot_continue_is_dropped(server, tmp_path):
    (tmp_path / ".file.bin.part").write_bytes(bytes(len(BODY) + 1))
    item = item_of(BODY, server.put("/file", whole(BODY)), size=None)
    assert get(item, tmp_path).read_bytes() == BODY and len(server.asked) == 2


def test_a_whole_part_needs_no_network(tmp_path):
    (tmp_path / ".file.bin.part").write_bytes(BODY)
    assert get(item_of(BODY, "http://127.0.0.1:9/file"), tmp_path).read_bytes() == BODY


def test_a_whole_part_that_is_damaged_is_fetched_anew(server, tmp_path):
    (tmp_path / ".file.bin.part").write_bytes(bytes(len(BODY)))
    item = item_of(BODY, server.put("/file", whole(BODY)))
    assert get(item, tmp_path).read_bytes() == BODY and server.ranges() == [""]


def test_an_answer_that_starts_elsewhere_is_not_appended(server, tmp_path):
    def elsewhere(answer: Answer) -> None:
        answer.head(206, Content_Length=10, Content_Range=f"bytes 0-9/{len(BODY)}")
        answer.wfile.write(BODY[:10])

    (tmp_path / ".file.bin.part").write_bytes(BODY[:1000])
    item = item_of(BODY, server.put("/file", in_turn(elsewhere, whole(BODY))))
    assert get(item, tmp_path).read_bytes() == BODY


def test_a_killed_process_is_continued_by_the_next(server, tmp_path):
    def slow(answer: Answer) -> None:
        answer.head(200, Content_Length=len(BODY))
        answer.wfile.write(BODY[:70_000])
        answer.wfile.flush()
        answer.web.stop.wait(900)

    item = item_of(BODY, server.put("/file", in_turn(slow, whole(BODY))))
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, repr(item), str(tmp_path)])
    part = tmp_path / ".file.bin.part"
    try:
        deadline = time.monotonic() + 900
        while not (part.is_file() and part.stat().st_size):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    assert get(item, tmp_path).read_bytes() == BODY
    assert server.ranges()[-1].startswith("bytes=") and names(tmp_path) == ["file.bin"]


SCRIPT = """
import sys; from pathlib import Path; from yolofleet.storage.fetch import *
print(fetch(eval(sys.argv[1]), Path(sys.argv[2])))
"""


# -- refusals


@pytest.mark.parametrize("code", [400, 401, 403, 404, 410, 501])
def test_a_final_status_is_not_asked_again(code, server, tmp_path):
    said = refusal(item_of(BODY, server.put("/file", status(code))), tmp_path)
    assert f"HTTP {code}" in said.what and len(server.asked) == 1


def test_what_a_server_says_cannot_command_the_terminal(server, tmp_path):
    def rude(answer: Answer) -> None:
        answer.send_response(404, "\x1b[2Jgone")
        answer.end_headers()

    said = refusal(item_of(BODY, server.put("/file", rude)), tmp_path).what
    assert "HTTP 404 ?[2Jgone" in said and said.isprintable()


@pytest.mark.parametrize("code", [429, 500, 502, 503, 504])
def test_a_passing_status_is_asked_again_then_given_up(code, server, tmp_path):
    item = item_of(BODY, server.put("/file", in_turn(status(code), status(code), whole(BODY))))
    assert get(item, tmp_path).read_bytes() == BODY
    server.asked.clear()
    said = refusal(item_of(BODY, server.put("/bad", status(code)), name="other"), tmp_path)
    assert f"HTTP {code}" in said.what and "3 attempts" in said.what and len(server.asked) == 3


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0.5", None),
        ("7", 7.0),
        ("", None),
        ("-1", None),
        ("Fri, 01 Jan 1999 00:00:00 GMT", 0.0),
        ("x", None),
    ],
)
def test_retry_after_is_read_as_seconds_or_date(text, seconds):
    assert request.retry_after_s(text) == seconds


def test_retry_after_is_waited_for_but_not_for_ever(server, tmp_path):
    item = item_of(
        BODY,
        server.put("/file", in_turn(status(503, Retry_After=1), status(503, Retry_After=86400), whole(BODY))),
    )
    told: list[str] = []
    patience = Patience(timeout_s=1, attempts=3, first_wait_s=0.01, longest_wait_s=0.03)
    get(item, tmp_path, patience=patience, tell=told.append)
    assert sum("next attempt in 0 s" in text for text in told) == 2  # 0.03 s, rounded


def test_the_next_url_is_asked_where_the_first_fails(server, tmp_path):
    urls = [
        server.put("/gone", status(404)),
        server.put("/wrong", whole(BODY[::-1])),
        server.put("/file", whole(BODY)),
    ]
    assert get(item_of(BODY, *urls), tmp_path).read_bytes() == BODY
    assert [path for path, _ in server.asked] == ["/gone", "/wrong", "/file"]


def test_a_part_from_one_url_is_continued_from_another(server, tmp_path):
    urls = [server.put("/a", whole(BODY, upto=60_000)), server.put("/b", whole(BODY))]
    assert get(item_of(BODY, *urls), tmp_path).read_bytes() == BODY
    assert server.asked[-1] == ("/b", "bytes=60000-")


@pytest.mark.parametrize("length", [len(BODY) - 1, len(BODY) + 1, 10**15])
def test_another_length_than_the_published_is_refused_at_once(length, server, tmp_path):
    def lying(answer: Answer) -> None:
        answer.head(200, Content_Length=length)
        answer.wfile.write(BODY)

    said = refusal(item_of(BODY, server.put("/file", lying)), tmp_path)
    assert f"has {length:,} bytes, expected 102,400" in said.what
    assert names(tmp_path) == [] and len(server.asked) == 1


@pytest.mark.parametrize("size", [-1, None])
def test_an_endless_body_is_cut_off_at_once(size, server, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch_module, "MAX_UNSTATED_BYTES", 200_000)
    sent = [0]

    def endless(answer: Answer) -> None:
        answer.head(200)
        while not answer.web.stop.is_set():
            sent[0] += answer.wfile.write(bytes(65536))

    said = refusal(item_of(BODY, server.put("/file", endless), size=size), tmp_path)
    assert "sent more than" in said.what and names(tmp_path) == []
    assert sent[0] < 20_000_000  # what the buffers of the connection took


def test_an_endless_chunked_body_is_cut_off_too(server, tmp_path):
    def endless(answer: Answer) -> None:
        answer.head(200, Transfer_Encoding="chunked")
        while not answer.web.stop.is_set():
            answer.wfile.write(b"10000\r\n" + bytes(65536) + b"\r\n")

    assert "sent more than" in refusal(item_of(BODY, server.put("/file", endless)), tmp_path).what
    assert names(tmp_path) == []


def test_wrong_bytes_are_removed_and_both_digests_shown(server, tmp_path):
    wrong = BODY[:-1] + b"!"
    item = item_of(BODY, server.put("/file", whole(wrong)))
    assert item.digest is not None
    said = refusal(item, tmp_path).what
    assert hashlib.sha256(wrong).hexdigest() in said and item.digest.split(":")[1] in said
    assert names(tmp_path) == [] and len(server.asked) == 1


def test_wrong_bytes_in_pieces_are_given_up_too(server, tmp_path):
    wrong = bytes(len(BODY))
    cut = in_turn(*[whole(wrong, upto=50_000), whole(wrong)] * 20)
    assert "its sha256 is" in refusal(item_of(BODY, server.put("/file", cut)), tmp_path).what
    assert names(tmp_path) == [] and len(server.asked) == 4


@pytest.mark.parametrize("says_so", [True, False])
def test_a_web_page_with_status_200_is_no_file(says_so, server, tmp_path):
    page = b"\n<!DOCTYPE html><html><body>Please log in</body></html>"

    def login(answer: Answer) -> None:
        answer.head(200, **({"Content_Type": "text/html; charset=utf-8"} if says_so else {}))
        answer.wfile.write(page)

    item = item_of(BODY, server.put("/file", login))
    assert "sent a web page instead" in refusal(item, tmp_path).what
    assert names(tmp_path) == [] and len(server.asked) == 1


def test_redirects_are_followed_but_not_for_ever(server, tmp_path):
    server.put("/b", whole(BODY))
    item = item_of(BODY, server.put("/a", status(302, Location="/b")))
    assert get(item, tmp_path).read_bytes() == BODY
    server.put("/loop", status(302, Location="/loop"))
    said = refusal(item_of(BODY, server.address + "/loop", name="other"), tmp_path).what
    assert "302" in said and len(server.asked) < 20
    for n in range(30):
        server.put(f"/{n}", status(301, Location=f"/{n + 1}"))
    assert "301" in refusal(item_of(BODY, server.address + "/0", name="other"), tmp_path).what


@pytest.mark.parametrize(
    "target", ["file:///etc/passwd", "ftp://127.0.0.1/x", "data:,x", "gopher://127.0.0.1/", "//[", "http://"]
)
def test_redirects_to_other_schemes_are_refused(target, server, tmp_path):
    refusal(item_of(BODY, server.put("/file", status(302, Location=target))), tmp_path)
    assert {path for path, _ in server.asked} == {"/file"} and names(tmp_path) == []


def test_a_redirect_from_https_to_http_is_refused():
    redirects = request.Redirects()
    with pytest.raises(request.Refused, match="from https to 'http://a/'"):
        redirects.redirect_request(Request("https://a/"), None, 302, "", {}, "http://a/")
    assert redirects.redirect_request(Request("https://a/"), None, 302, "", {}, "https://b/")


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://127.0.0.1/x", "/etc/passwd", "http:///x", "http://[/"]
)
def test_only_http_is_asked(url, tmp_path):
    refusal(item_of(BODY, url), tmp_path)


# -- slow, absent, forbidden


def test_a_server_that_stalls_is_left_and_asked_again(server, tmp_path):
    def stalling(answer: Answer) -> None:
        answer.head(200, Content_Length=len(BODY))
        answer.wfile.write(BODY[:20_000])
        answer.wfile.flush()
        answer.web.stop.wait(3600)

    item = item_of(BODY, server.put("/file", in_turn(stalling, whole(BODY))))
    assert get(item, tmp_path).read_bytes() == BODY
    assert server.ranges() == ["", "bytes=20000-"]


def test_a_server_that_drips_has_stalled(server, tmp_path):
    def dripping(answer: Answer) -> None:
        answer.head(200, Content_Length=len(BODY))
        while not answer.web.stop.wait(0.05):
            answer.wfile.write(b"x")
            answer.wfile.flush()

    said = refusal(item_of(BODY, server.put("/file", dripping)), tmp_path)
    assert "bytes arrived in 0 s" in said.what and len(server.asked) == 3


def test_a_server_that_says_nothing_is_given_up(server, tmp_path):
    item = item_of(BODY, server.put("/file", lambda answer: void(answer.web.stop.wait(900))))
    said = refusal(item, tmp_path)
    assert "timed out" in said.what and len(server.asked) == 3


def test_an_answer_that_is_no_http_is_given_up(server, tmp_path):
    item = item_of(BODY, server.put("/file", lambda answer: void(answer.wfile.write(b"SSH-2.0-x\r\n\r\n"))))
    refusal(item, tmp_path)


def void(_: object) -> None:
    return None


def test_an_unreachable_network_is_explained(tmp_path):
    item = item_of(BODY, "http://127.0.0.1:9/file")  # the port is closed
    said = refusal(item, tmp_path)
    assert "not reachable" in said.what
    assert item.digest is not None
    for part in (item.urls[0], "100.0 KiB", item.digest.replace(":", " "), str(tmp_path), item.name):
        assert part in said.hint
    assert "kept" not in said.hint


def test_a_host_that_is_not_found_is_said_at_once(tmp_path, monkeypatch):
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    patience = Patience(first_wait_s=100)
    with pytest.raises(DownloadError, match=r"the name files\.invalid is not found"):
        get(item_of(BODY, "http://files.invalid/file"), tmp_path, patience=patience)


@pytest.mark.parametrize("value", ["1", "yes", "true"])
def test_offline_means_that_nothing_is_asked(value, server, tmp_path, monkeypatch):
    monkeypatch.setenv("YOLOFLEET_OFFLINE", value)
    item = item_of(BODY, server.put("/file", whole(BODY)))
    assert "YOLOFLEET_OFFLINE is set" in refusal(item, tmp_path).what and not server.asked
    (tmp_path / "file.bin").write_bytes(BODY)
    assert get(item, tmp_path).read_bytes() == BODY
    monkeypatch.setenv("YOLOFLEET_OFFLINE", "0")
    assert not fetch_module.is_offline()


def test_a_folder_that_cannot_be_written_is_said(server, tmp_path):
    (tmp_path / "file").write_text("")
    item = item_of(BODY, server.put("/file", whole(BODY)))
    with pytest.raises(StorageError, match="cannot write"):
        get(item, tmp_path / "file" / "below")
    assert not server.asked


def test_a_disk_that_is_too_small_is_said_before_anything_comes(server, tmp_path, monkeypatch):
    Usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9, 1000))
    with pytest.raises(StorageError, match=r"1000 bytes free; 100.0 KiB more are needed"):
        get(item_of(BODY, server.put("/file", whole(BODY))), tmp_path)
    assert "file.bin" not in names(tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of processes")
def test_a_disk_that_refuses_in_the_middle_leaves_what_came(server, tmp_path):
    # writes beyond 50,000 bytes fail with EFBIG, as they do with ENOSPC on a full disk
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n" + SCRIPT
    item = item_of(BODY, server.put("/file", whole(BODY)))
    done = subprocess.run(
        [sys.executable, "-c", code, repr(item), str(tmp_path)], capture_output=True, text=True
    )
    assert "StorageError" in done.stderr and "File too large" in done.stderr
    assert names(tmp_path) == [".file.bin.part"]
    assert get(item, tmp_path).read_bytes() == BODY and server.ranges()[-1] == "bytes=50000-"


# -- several at once


def test_of_two_processes_one_downloads_and_the_other_waits(server, tmp_path):
    def slow(answer: Answer) -> None:
        answer.head(200, Content_Length=len(BODY))
        for at in range(0, len(BODY), 10_000):
            answer.wfile.write(BODY[at : at + 10_000])
            answer.wfile.flush()
            time.sleep(0.1)

    item = item_of(BODY, server.put("/file", slow))
    command = [sys.executable, "-c", SCRIPT, repr(item), str(tmp_path)]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in (0, 1)
    ]
    outputs = [process.communicate(timeout=900) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert len(server.asked) == 1 and names(tmp_path) == ["file.bin"]
    assert sum("another process is downloading it" in err for _, err in outputs) == 1


def test_of_many_threads_one_downloads(server, tmp_path):
    item = item_of(BODY, server.put("/file", whole(BODY)))
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(get(item, tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(server.asked) == 1 and names(tmp_path) == ["file.bin"]


def test_the_one_that_waits_takes_over_when_the_other_fails(server, tmp_path):
    item = item_of(BODY, server.put("/file", in_turn(status(404), whole(BODY))))
    with exclusive(tmp_path / ".file.bin.lock") as is_mine:
        assert is_mine
        waiting = threading.Thread(target=lambda: get(item, tmp_path))
        waiting.start()
        time.sleep(0.3)
        assert waiting.is_alive()
        refused = pytest.raises(DownloadError)
        with refused:
            fetch_module._Download(item, tmp_path, IMPATIENT, lambda text: None).run()
    waiting.join(900)
    assert (tmp_path / "file.bin").read_bytes() == BODY


def test_one_that_makes_no_progress_is_not_waited_for_for_ever(server, tmp_path):
    item = item_of(BODY, server.put("/file", whole(BODY)))
    held = exclusive(tmp_path / ".file.bin.lock")
    with held, pytest.raises(DownloadError, match="has made no progress for 1 s"):
        get(item, tmp_path)
    assert get(item, tmp_path).read_bytes() == BODY


# -- by hand


def test_a_file_got_by_hand_is_checked_and_taken_over(tmp_path):
    item = item_of(BODY, "https://example.org/file")
    mine = tmp_path / "mine"
    mine.write_bytes(BODY)
    assert adopt(item, mine, tmp_path / "cache").read_bytes() == BODY and mine.exists()
    mine.write_bytes(BODY[:-1] + b"x")
    with pytest.raises(DownloadError, match=r"is not the published file\.bin"):
        adopt(item, mine, tmp_path / "cache2")
    assert names(tmp_path / "cache") == ["file.bin"] and not (tmp_path / "cache2").exists()


def _forever(piece: bytes) -> object:
    def route(answer: Answer) -> None:
        while not answer.web.stop.is_set():
            answer.wfile.write(piece)
            time.sleep(0.001)

    return route


def _chunked_without_end(answer: Answer) -> None:
    answer.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n")
    _forever(b"X: y\r\n")(answer)  # type: ignore[operator]


@pytest.mark.parametrize(
    "route",
    [_forever(b"HTTP/1.1 100 Continue\r\n\r\n"), _chunked_without_end],
    ids=["100-continue", "trailers"],
)
def test_a_server_that_sends_headers_without_end_is_given_up(
    server: Web, tmp_path: Path, route: Callable[[Answer], None]
) -> None:
    problem = refusal(item_of(BODY, server.put("/a", route)), tmp_path)
    reasons = ("it sent no content for 0 s", "trailer", "interim responses")  # the last one: Python 3.14
    assert any(reason in problem.what for reason in reasons)
