"""The page of one's own computer: who can read where it is, and what it consists of."""

import asyncio
import re

import pytest

from peers.config.errors import ConfigError
from peers.config.peer_file import validate_peer_file
from peers.config.yaml_lines import ParsedYaml
from peers.process.own_page import ALLOWED, OwnPage, page_files
from peers.runtime.control_server import Control


def config_of(folder, page):
    return validate_peer_file(
        ParsedYaml("x", {"run": "ab" * 32, "state": str(folder), "page": page}), folder, "x", {}
    )


async def test_the_secret_is_in_a_file_of_the_user_and_gone_with_the_peer(tmp_path):
    page = OwnPage(config_of(tmp_path, "127.0.0.1:0"), Control(tmp_path))
    answer = await page.answer({})
    file = tmp_path / "page.html"
    assert answer == {"url": page.secret_url, "file": str(file)}
    assert file.stat().st_mode & 0o777 == 0o600
    assert page.secret_url in file.read_text()
    url, _, token = page.secret_url.partition("#")
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url)
    assert len(token) >= 32
    other = OwnPage(config_of(tmp_path, "127.0.0.1:0"), Control(tmp_path))
    assert other.secret_url.partition("#")[2] != token
    for each in (page, other):
        await asyncio.to_thread(each.close)
    assert not file.exists()


@pytest.mark.parametrize("address", ["0.0.0.0:9400", "192.168.1.7:9400", "my.example:9400", "[::]:9400"])
def test_the_page_is_never_for_other_computers(tmp_path, address):
    with pytest.raises(ConfigError, match="for this computer alone"):
        config_of(tmp_path, address)


def test_the_page_takes_its_style_from_the_observers_and_loads_nothing_from_elsewhere():
    files = {path: found.body.decode() for path, found in page_files().items()}
    html = files["/"]
    assert "--paper:" in files["/page.css"]
    assert "function duration(" in files["/functions.js"]
    wanted = re.findall(r'(?:src|href)="([^"]+)"', html)
    assert set(wanted) == {path[1:] for path in files if path != "/"}
    assert not re.search(r"<script>|<style|\son[a-z]+=", html), "the policy allows none inside the page"
    assert not [
        path for path, text in files.items() if re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    ]
    assert set(re.findall(r'\{do: "(\w+)"', files["/own_page.js"])) <= set(ALLOWED)
