"""The page as a file: what its headers allow, and what it must not contain."""

from __future__ import annotations

import base64
import hashlib
import re

from pace.server.page import page


def test_the_policy_names_the_script_and_the_style_by_their_hashes():
    policy = page().headers["Content-Security-Policy"]
    text = page().body.decode()
    for directive, tag in (("script-src", "script"), ("style-src", "style")):
        begin = text.index(">", text.index(f"<{tag}")) + 1
        content = text[begin : text.index(f"</{tag}>", begin)]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}';" in policy
    assert "unsafe" not in policy
    for rule in ("default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'", "base-uri 'none'"):
        assert rule in policy


def test_the_other_headers():
    headers = page().headers
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["ETag"] == page().etag


def test_a_browser_that_has_the_page_is_known_by_its_etag():
    etag = page().etag
    assert page().is_known(etag)
    assert page().is_known(f'"other", W/{etag}')
    assert page().is_known("*")
    assert not page().is_known(None)
    assert not page().is_known('"other"')


def test_the_page_is_small_and_asks_nobody_else():
    text = page().body.decode()
    assert len(page().body) < 63_000
    assert text.count("<script") == text.count("<style") == 1
    addresses = set(re.findall(r"https?://[\w./]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}, "the name of a format, which nothing fetches"
    assert not re.findall(r'(?:src|href)="(?!data:|#)', text)


def test_nothing_is_parsed_as_html_and_nothing_is_inline():
    text = page().body.decode()
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc|DOMParser"
    assert not re.findall(sinks, text)
    assert not re.findall(r"<[^>]+\son\w+=", text)
    assert not re.findall(r"<[^>]+\sstyle=", text)
