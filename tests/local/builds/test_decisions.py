"""What is decided without I/O: names of images, instructions, the log, the catalog, addresses of uploads."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime

import pytest

from managed_e2b.local.builds import provision, reference, steps
from managed_e2b.local.builds.model import MAX_ENTRIES, Level, Log, Step, StepKind
from managed_e2b.local.builds.reference import Endpoint, endpoint, parse, parse_mirror
from managed_e2b.local.builds.steps import BadStep, copy_of, expansion, key_of, pairs, user_of, workdir_of
from managed_e2b.local.builds.uploads import Uploads
from managed_e2b.local.clock import SystemClock
from managed_e2b.local.errors import ApiError
from managed_e2b.local.templates import Build, Template, TemplateCatalog, check_tags

NOW = datetime(2026, 1, 1, tzinfo=UTC)
DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("ubuntu", "docker.io/library/ubuntu:latest"),
        ("ubuntu:22.04", "docker.io/library/ubuntu:22.04"),
        ("e2bdev/base", "docker.io/e2bdev/base:latest"),
        ("docker.io/python:3", "docker.io/library/python:3"),
        ("index.docker.io/library/python:3", "docker.io/library/python:3"),
        ("ghcr.io/o/r/n:v1", "ghcr.io/o/r/n:v1"),
        ("localhost/x", "localhost/x:latest"),
        ("127.0.0.1:5000/a/b:c", "127.0.0.1:5000/a/b:c"),
        (f"ubuntu:1@{DIGEST}", f"docker.io/library/ubuntu@{DIGEST}"),
    ],
)
def test_names_of_images(text, whole):
    assert str(parse(text)) == whole


@pytest.mark.parametrize(
    "text",
    ["", " ", "UPPER", "a b", "a/../b", "a//b", "a:", "a:b:c", "a@sha256:1", "http://x/y", "x/y?z", "-a", "a" * 600,
     "a\n/b"],
)  # fmt: skip
def test_what_is_no_image(text):
    with pytest.raises(ValueError, match="expected"):
        parse(text)


def test_where_an_image_is_asked_for():
    assert endpoint(parse("x"), {}) == Endpoint("registry-1.docker.io", False, False)
    assert endpoint(parse("ghcr.io/x/y"), {}) == Endpoint("ghcr.io", False, False)
    for host in ("127.0.0.1:5000", "localhost:5000", "127.1.2.3"):
        assert endpoint(parse(f"{host}/x"), {}) == Endpoint(host, True, False)
    for host in ("127.0.0.1.evil.org", "localhost.evil.org", "10.0.0.1:5000"):
        assert endpoint(parse(f"{host}/x"), {}).insecure is False
    mirrors = dict(parse_mirror(text) for text in ("docker.io=http://127.0.0.1:5000", "ghcr.io=https://m.example/"))
    assert endpoint(parse("x"), mirrors) == Endpoint("127.0.0.1:5000", True, True)
    assert endpoint(parse("ghcr.io/x/y"), mirrors) == Endpoint("m.example", False, True)


@pytest.mark.parametrize(
    "text", ["", "docker.io", "docker.io=ftp://x", "docker.io=http://", "=http://x", "a=http://u:p@x/"]
)
def test_what_is_no_mirror(text):
    with pytest.raises(ValueError, match="expected"):
        parse_mirror(text)


def step(kind: StepKind, *args: str, files: str | None = "ab" * 32) -> Step:
    return Step(kind, args, files)


def test_the_key_of_a_step_tells_all_that_it_does():
    keys = {
        key_of(before, step)
        for before in ("a", "b")
        for step in (
            Step(StepKind.RUN, ("x",)),
            Step(StepKind.RUN, ("x", "root")),
            Step(StepKind.RUN, ("x root",)),
            Step(StepKind.ENV, ("x",)),
            Step(StepKind.RUN, ("x",), "f"),
        )
    }
    assert len(keys) == 10
    assert key_of("a", Step(StepKind.RUN, ("x",), force=True)) == key_of("a", Step(StepKind.RUN, ("x",)))


@pytest.mark.parametrize(
    ("source", "fixed"),
    [
        ("a/b.txt", "a/b.txt"), ("folder/*", "folder"), ("**/x", "."), (".", "."), ("a/b*/c", "a"), ("./a/", "a"),
        ("../../etc", "etc"), ("/abs", "abs"), ("a/[bc]", "a"), ("{a,b}", "."), ("a/../b", "b"),
    ],
)  # fmt: skip
def test_what_a_copy_takes_from_the_archive(source, fixed):
    assert copy_of(step(StepKind.COPY, source, "dst", "", ""), "user").source == fixed


def test_owner_and_mode_of_a_copy():
    assert copy_of(step(StepKind.COPY, "a", "b"), "me").owner == "me:me"
    assert copy_of(step(StepKind.COPY, "a", "b", "u"), "me").owner == "u:u"
    assert copy_of(step(StepKind.COPY, "a", "b", "u:g", "0644"), "me").owner == "u:g"
    for args in (("a",), ("a", "", "", ""), ("a", "b", "$(id)"), ("a", "b", "", "9"), ("a", "b", "", "x;y")):
        with pytest.raises(BadStep):
            copy_of(step(StepKind.COPY, *args), "me")
    with pytest.raises(BadStep):
        copy_of(step(StepKind.COPY, "a", "b", files=None), "me")


def test_scripts_quote_what_they_are_given():
    copy = copy_of(step(StepKind.COPY, "a'b", "/t/$(touch /x) 'y'"), "user")
    for script in (
        steps.copy_script(copy, "/tmp/it's", "/w"),
        steps.workdir_script("/a'; touch /x; '", "user"),
        steps.user_script("user"),
        provision.script(one_id=False),
        provision.script(one_id=True),
    ):
        subprocess.run(["bash", "-n", "-c", script], check=True)
    assert "source='a'\"'\"'b'\n" in steps.copy_script(copy, "/tmp/x", "/w")


@pytest.mark.parametrize(
    ("value", "expanded"),
    [
        ("plain", "plain"), ("$A", "one"), ("${A}x", "onex"), ("$NONE", ""), ("\\$A", "\\one"), ('"$A"', '"one"'),
        ("$(id)$A", "$(id)one"), ("`id`$A", "`id`one"), ("$((1+1))$A", "$((1+1))one"), ("a\nb$A", "a\nbone"),
        ("%s$A", "%sone"),
    ],
)  # fmt: skip
def test_variables_are_expanded_and_nothing_is_run(value, expanded):
    command = expansion(value)
    if command is None:
        assert value == expanded
        return
    ran = subprocess.run(["bash", "-c", command], env={"A": "one"}, capture_output=True, text=True, check=True)
    assert ran.stdout == expanded


def test_other_instructions():
    assert pairs(step(StepKind.ENV, "A", "1", "B", "")) == {"A": "1", "B": ""}
    for args in ((), ("A",), ("A=B", "1"), ("", "1"), ("A\n", "1")):
        with pytest.raises(BadStep):
            pairs(step(StepKind.ENV, *args))
    assert workdir_of(step(StepKind.WORKDIR, "x/../y"), "/a") == "/a/y"
    assert workdir_of(step(StepKind.WORKDIR, "//x"), "/a") == "/x"
    assert user_of(step(StepKind.USER, "me", "true")) == ("me", True)
    for bad in ("", "a b", "$(id)", "-x", "a" * 100):
        with pytest.raises(BadStep):
            user_of(step(StepKind.USER, bad))


def test_a_log_is_bounded_and_read_in_pages():
    log = Log(SystemClock())
    for number in range(MAX_ENTRIES + 50):
        log.add(str(number), level=Level.DEBUG)
    log.add("the end", level=Level.ERROR)
    assert len(log.entries) == MAX_ENTRIES + 2
    assert [entry.message for entry in log.entries[-2:]] == ["The rest of the log is not kept", "the end"]
    assert [entry.message for entry in log.page(5, 2)] == ["5", "6"]
    assert len(log.page(0, 10**6)) == 100
    assert log.page(MAX_ENTRIES + 2, 100) == []
    assert [entry.message for entry in log.page(0, 100, Level.WARN)] == ["The rest of the log is not kept", "the end"]


def test_tags_of_the_catalog():
    catalog = TemplateCatalog(NOW)
    template = Template("id1", NOW, names=["one"])
    catalog.add(template)
    first, second = Build("b1", "i1", NOW), Build("b2", "i2", NOW)
    assert catalog.assign(template, first, ["default", "v1"], NOW) == []
    assert catalog.assign(template, second, ["default"], NOW) == []
    assert catalog.resolve("ONE").build is second
    assert catalog.resolve("id1:v1").build is first
    assert catalog.resolve("one:b1").build is first, "a build's id names it, too"
    assert catalog.assign(template, second, ["v1"], NOW) == [first]
    with pytest.raises(ApiError, match="tag 'x' does not exist"):
        catalog.unassign(template, ["v1", "x"])
    assert catalog.unassign(template, ["v1"]) == []
    assert catalog.unassign(template, ["default"]) == [second]
    with pytest.raises(ApiError) as taken:
        catalog.add(Template("id2", NOW, names=["one"]))
    assert taken.value.status == 409
    assert catalog.remove(template) == []
    assert catalog.find("one") is None
    assert check_tags(["A", "a", "b.c"]) == ["a", "b.c"]


def test_an_address_is_good_for_its_files_until_its_end(tmp_path):
    uploads = Uploads(lambda: tmp_path, SystemClock())
    files = "ab" * 32
    query = dict(pair.split("=") for pair in uploads.address(files).partition("?")[2].split("&"))
    uploads.check(files, **query)
    for other in (
        (files, query["expires"], "0" * 64),
        ("cd" * 32, query["expires"], query["signature"]),
        (files, str(int(query["expires"]) + 1), query["signature"]),
        (files, "", query["signature"]),
        ("../../x", query["expires"], query["signature"]),
    ):
        with pytest.raises(ApiError, match="invalid signature"):
            uploads.check(*other)
    with pytest.raises(ApiError, match="invalid signature"):
        Uploads(lambda: tmp_path, SystemClock()).check(files, **query)  # of another server


def test_the_provisioning_has_a_version_that_follows_it():
    assert provision.version(one_id=True) != provision.version(one_id=False)
    assert reference.DOCKER_HUB == "docker.io"
