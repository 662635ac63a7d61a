"""Secrets: which names and values are secret, and text without them. What is kept, printed or in an argv has none."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache, lru_cache

from pytest_llmperf.support.files import shipped

#: In place of a secret. Not a digest, in which a weak secret can be searched for.
SET = "<set>"

_READ = shipped(__file__, "secrets.ini")
_WORDS, _OF_DATA = (frozenset(words.split()) for words in _READ["words"].values())
_GLUED = re.compile(rf"(?:{'|'.join(_READ['glued'].values())})$")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_FOLDERS = frozenset({"PWD", "OLDPWD"})
# Of tokens that a model knows: MAX_TOKENS=4096, pad_token_id=0.
_COUNT = re.compile(r"-?\d{1,7}|true|false|none|null", re.IGNORECASE)
_COUNTED = frozenset({"TOKENS", "KEYS", "ID", "IDS", "COUNT", "NUM"})

# scheme://user:password@ of any scheme and https://token@; up to the last @ before the path.
_URL = re.compile(
    r"\b([a-z][a-z0-9+.-]*://)((?:(?<=http://)|(?<=https://))[^\s/?#'\"]+|[^\s/?#:'\"]*:[^\s/?#'\"]*)@", re.IGNORECASE
)
_ISSUED = re.compile("|".join(_READ["issued"].values()))
_BEARER = re.compile(r"\b((?:Bearer|(?i:authorization)[\"']?: ?[\"']?\w+)\s+|Basic\s+(?=[\w+/]*[0-9=]))[\w.~+/=-]{8,}")
# name:password@host:port, as proxies are written.
_PROXY = re.compile(r"(?<![\w/@:])([\w.-]+:)[^\s:@/]+(@[\w.-]+:\d+)\b")
# NAME=value of a shell, --name value of a command, "name": "value" of JSON, ?name=value of an address.
_VALUE = r"(?P<value>\"[^\"]*\"|'[^']*'|[^\s\"'&;,)\]}]+)"
_NAME = re.compile(
    r"(?P<lead>(?<![\w-])--?|[?&]|(?<![\w-]))(?P<name>[A-Za-z][\w.-]*)"
    r"(?P<between>(?:[\"'] ?)?(?: ?=(?!=) ?|:(?!//)[ ]?))"
)
_PAIR = re.compile(_NAME.pattern + _VALUE)
_OPTION = re.compile(r"(?P<lead>(?<![\w-])--)(?P<name>[A-Za-z][\w-]*)(?P<between> +)(?![-=])" + _VALUE)
_SHELL_NAME = re.compile(r"[A-Z][A-Z0-9_]*")
_STRONG = re.compile(rf"(?:^|[_.-])(?:{'|'.join(_READ['strong'].values())})$", re.IGNORECASE)
_RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z])\S{8,}")
# Filled in by somebody else, or a token of a text: $HF_TOKEN, {token}, </s>, [PAD].
_STANDS_FOR = ("$", "{", "<", "[", "%")
_SHORTEST, _LONGEST_WORD = 8, 16


@lru_cache(4096)
def is_secret(name: str, value: str) -> bool:
    """Whether ``value`` of this variable or option is nobody else's business: by its name, or by what it holds."""
    return bool(value) and (_is_secret_name(name, value) or without_secrets(value) != value)


def redacted(variables: Mapping[str, str]) -> dict[str, str]:
    """``variables`` with ``<set>`` in place of secret values."""
    return {name: SET if is_secret(name, value) else value for name, value in variables.items()}


def without_secrets(text: str) -> str:
    """``text`` with ``<set>`` in place of what is secret in it, also where it quotes a secret of this environment."""
    for secret in _values():
        text = text.replace(secret, SET)
    if "://" in text:
        text = _URL.sub(rf"\1{SET}@", text)
    text = _BEARER.sub(rf"\1{SET}", _ISSUED.sub(SET, text))
    if "@" in text:
        text = _PROXY.sub(rf"\1{SET}\2", text)
    if "--" in text:
        text = _OPTION.sub(_pair, text)
    return _without_pairs(text) if "=" in text or ":" in text else text


def _without_pairs(text: str) -> str:
    parts, done = list[str](), 0
    # By their names, as what is no secret's value may be a pair: RuntimeError: PASSWORD=...
    for name in _NAME.finditer(text):
        match = _PAIR.match(text, name.start()) if name.start() >= done and _may_be_secret(name["name"]) else None
        if match is not None and (told := _pair(match)) != match[0]:
            parts += [text[done : match.start()], told]
            done = match.end()
    return "".join([*parts, text[done:]])


@lru_cache(4096)
def _may_be_secret(name: str) -> bool:
    return _STRONG.search(name) is not None or _is_secret_name(name, "")


def _pair(match: re.Match[str]) -> str:
    lead, name, between, value = match.group("lead", "name", "between", "value")
    bare = value.strip("\"'")
    is_key, is_named = between[0] in "\"'", _STRONG.search(name) is not None
    if value.startswith(_STANDS_FOR):
        is_named = False
    elif lead.startswith("-") or is_key or "." in name or (name == "token" and "=" in between):
        is_named = is_named or _is_secret_field(name, bare, is_option=lead.startswith("-"))
    # PASS: in a sentence is a word; so is any other name that no shell, command or JSON would write so.
    elif lead or (_SHELL_NAME.fullmatch(name) and between != ": "):
        is_named = _is_secret_name(name, bare)
    return f"{lead}{name}{between}{SET}" if is_named and bare else match[0]


def _is_secret_field(name: str, value: str, *, is_option: bool) -> bool:
    """Of an option, or a field of some configuration: by its last word, and mostly by what it holds."""
    words = _words_of(name)
    if not words or _OF_DATA.intersection(words) or not _is_secret_name(words[-1], value):
        return False
    return (is_option and _GLUED.search(words[-1]) is not None) or _RANDOM.fullmatch(value) is not None


def _words_of(name: str) -> list[str]:
    return [word.upper() for word in _WORD.findall(name)]


def _is_secret_name(name: str, value: str) -> bool:
    words = _words_of(name)
    if name in _FOLDERS or (_COUNTED.intersection(words) and _COUNT.fullmatch(value)):
        return False
    return any(word in _WORDS or _GLUED.search(word) for word in words)


@cache
def _values() -> tuple[str, ...]:
    """Secrets of this process's environment, which a library's error may quote: whole, by their lines, as ``repr``."""
    found = list[str]()
    for name, value in os.environ.items():
        is_weak = value.isalpha() and len(value) < _LONGEST_WORD and not any(map(_GLUED.search, _words_of(name)))
        is_path = value[:1] in ("/", "~", ".") and _is_place(os.path.expanduser(value))  # noqa: PTH111
        if len(value) >= _SHORTEST and not is_weak and not is_path and _is_secret_name(name, value):
            lines = [line.strip() for line in value.splitlines() if len(line.strip()) >= _LONGEST_WORD]
            found += [value, repr(value)[1:-1], *(lines if len(lines) > 1 else ())]
    return tuple(dict.fromkeys(found))


def _is_place(path: str) -> bool:
    """Whether something is there, or could be: no key in base64 names a folder of this machine."""
    folder = os.path.dirname(path)  # noqa: PTH120
    return os.path.lexists(path) or (folder != "/" and os.path.isdir(folder))  # noqa: PTH112
