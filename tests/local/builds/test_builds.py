"""Builds from `base`, by E2B's SDK against a real server."""

from __future__ import annotations

import asyncio
import io
import tarfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from e2b import AsyncTemplate, Template
from e2b.exceptions import BuildException, SandboxException, TemplateException

from managed_e2b.local.builds import uploads
from managed_e2b.local.server import LocalServer

from .conftest import World

pytestmark = pytest.mark.asyncio(loop_scope="module")


def name() -> str:
    return f"t-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """Files to copy."""
    folder = tmp_path / "app"
    (folder / "sub").mkdir(parents=True)
    (folder / "main.py").write_text("print('main')\n")
    (folder / "sub" / "data.txt").write_text("data\n")
    (folder / "link").symlink_to("sub/data.txt")
    return tmp_path


async def test_what_steps_do_is_there_in_its_sandboxes(world, context):
    template = (
        AsyncTemplate(file_context_path=str(context))
        .from_template("base")
        .set_envs({"ONE": "1", "QUOTED": 'a "b" `id` $(id) \\'})
        .set_envs({"TWO": "${ONE}2"})
        .copy("app/*", "app")
        .copy("app/main.py", "/opt/here/", user="root", mode=0o700)
        .copy("app/main.py", "/opt/renamed.py")
        .set_workdir("/work/deep")
        .run_cmd("echo $TWO > out; pwd >> out; id -un >> out")
        .run_cmd("id -un > /root/out", user="root")
    )
    reference, root = name(), world.root
    await world.build(template, reference)
    script = (
        'pwd; cat out; sudo cat /root/out; echo $TWO; echo "$QUOTED"; cat ~/app/main.py ~/app/link;'
        "readlink ~/app/link;"
        "stat -c '%U %a' /opt/here /opt/here/main.py /opt/renamed.py /work /work/deep ~/app/sub; ls -A /tmp"
    )
    assert (await world.output(reference, script)).splitlines() == [
        "/work/deep", "12", "/work/deep", "user", root, "12", 'a "b" `id` $(id) \\', "print('main')", "data",
        "sub/data.txt", f"{root} 755", f"{root} 700", "user 644", "user 755", "user 755", "user 755",
    ]  # fmt: skip


async def test_an_unchanged_beginning_is_not_run_again(world):
    def template(last: str, *, force: bool = False):
        start = AsyncTemplate().from_template("base").run_cmd("cat /proc/sys/kernel/random/uuid > /tmp/one")
        if force:
            start = start.skip_cache()
        return start.run_cmd("cat /proc/sys/kernel/random/uuid > /tmp/two").run_cmd(f"echo {last} > /tmp/last")

    first, second, third, forced = name(), name(), name(), name()
    await world.build(template("a"), first)
    assert world.said("CACHED") == []
    await world.build(template("b"), second)
    assert len(world.said("CACHED")) == 2
    await world.build(template("b"), third)
    assert len(world.said("CACHED")) == 3
    await world.build(template("b", force=True), forced)
    assert len(world.said("CACHED")) == 1
    seen = [await world.output(one, "cat /tmp/one /tmp/two /tmp/last") for one in (first, second, third, forced)]
    assert seen[0].replace("\na\n", "\nb\n") == seen[1] == seen[2]
    assert seen[3].splitlines()[0] == seen[0].splitlines()[0]
    assert seen[3].splitlines()[1] != seen[0].splitlines()[1]


async def test_a_changed_file_is_copied_anew(world, context):
    template = AsyncTemplate(file_context_path=str(context)).from_template("base").copy("app/main.py", "main.py")
    one, two = name(), name()
    await world.build(template, one)
    (context / "app" / "main.py").write_text("print('changed')\n")
    await world.build(template, two)
    assert world.said("CACHED") == []
    assert await world.output(one, "cat main.py") == "print('main')\n"
    assert await world.output(two, "cat main.py") == "print('changed')\n"


async def test_a_template_is_made_of_another_and_of_a_snapshot(world):
    first, second, third = name(), name(), name()
    await world.build(AsyncTemplate().from_template("base").set_envs({"A": "1"}).run_cmd("echo one > one"), first)
    await world.build(AsyncTemplate().from_template(first).run_cmd("cat one > two; echo $A >> two"), second)
    assert await world.output(second, "cat one two; echo $A") == "one\none\n1\n1\n"
    async with await world.create(second) as sandbox:
        await sandbox.commands.run("echo kept > kept")
        snapshot = await sandbox.create_snapshot()
    await world.build(AsyncTemplate().from_template(snapshot.snapshot_id).run_cmd("cat kept > three"), third)
    assert await world.output(third, "cat three two") == "kept\none\n1\n"


async def test_an_image_of_a_dockerfile_that_is_nowhere(world, context):
    template = AsyncTemplate(file_context_path=str(context)).from_dockerfile(
        "FROM 127.0.0.1:1/none:1\nENV WHERE=/srv/app\nWORKDIR /srv/app\nCOPY app/ .\nRUN ls > listing\nUSER root\n"
    )
    with pytest.raises(BuildException) as failed:  # expanded by the SDK; its image is nowhere
        await world.build(template, name())
    assert "127.0.0.1:1/none:1" in str(failed.value)


@pytest.mark.parametrize(
    ("change", "step", "message"),
    [
        (lambda t: t.run_cmd("echo e >&2; exit 3"), "2", "failed to run command 'echo e >&2; exit 3': exit status 3"),
        (lambda t: t.run_cmd("kill -9 $$"), "2", "signal: killed"),
        (lambda t: t.run_cmd("id", user="nobody1"), "2", "failed: unauthenticated: invalid username: 'nobody1'"),
        (lambda t: t.set_workdir("/etc/passwd/x"), "2", "exit status"),
        (lambda t: t.set_user("bad name;id"), "2", "is no name of a user"),
        (lambda t: t.set_envs({"BAD NAME": "x"}), "2", "is no name of a variable"),
        (lambda t: t.set_start_cmd("exit 4", "false"), "finalize", "error running start command: exit status 4"),
    ],
)  # fmt: skip
async def test_a_failing_step_is_named(world, change, step, message):
    template = change(AsyncTemplate().from_template("base").run_cmd("true"))
    reference = name()
    with pytest.raises(BuildException) as failed:
        await world.build(template, reference)
    assert message in str(failed.value)
    status = await _status(world, reference)
    assert status["status"] == "error"
    assert status["reason"]["step"] == step
    assert world.said("Build failed")
    with pytest.raises(SandboxException, match="tag 'default' does not exist"):
        await world.create(reference)


async def _status(world, reference: str, query: str = "") -> dict:
    async with _client(world) as client:
        templates = (await client.get("/templates")).json()
        (found,) = [item for item in templates if reference in item["names"]]
        answer = await client.get(f"/templates/{found['templateID']}/builds/{found['buildID']}/status{query}")
        return answer.json()


async def _until(world, reference: str, reached: Callable[[dict], bool]) -> None:
    deadline = time.monotonic() + 30
    while not reached(await _status(world, reference)):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def _until_there(world, reference: str) -> None:
    """A build in a task has no template before the server has heard of it."""
    deadline = time.monotonic() + 30
    async with _client(world) as client:
        while all(reference not in item["names"] for item in (await client.get("/templates")).json()):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)


def _client(world) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=world.server.url, headers={"X-API-KEY": world.server.api_key})


async def test_the_log_comes_in_pages_and_ends(world):
    reference = name()
    await world.build(
        AsyncTemplate().from_template("base").run_cmd("for i in $(seq 250); do echo line-$i; done"), reference
    )
    assert [message.rpartition("-")[2] for message in world.said("stdout]: line-")] == [str(n) for n in range(1, 251)]
    first = await _status(world, reference, "?logsOffset=0&limit=100")
    assert len(first["logEntries"]) == 100
    assert (await _status(world, reference, f"?logsOffset={len(world.logs) - 2}"))["logEntries"] == []
    assert (await _status(world, reference, "?logsOffset=x")).get("code") == 400


async def test_deleting_a_template_ends_its_build(world):
    reference = name()
    template = AsyncTemplate().from_template("base").run_cmd("echo begun; sleep 1000")
    info = await AsyncTemplate.build_in_background(template, reference, **world.options)
    await _until(world, reference, lambda status: any("begun" in e["message"] for e in status["logEntries"]))
    before = world.server.registry.counters.created
    async with _client(world) as client:
        assert (await client.delete(f"/templates/{reference}")).status_code == 204
        path = f"/templates/{info.template_id}/builds/{info.build_id}/status"
        status = (await client.get(path)).json()
        assert (status["status"], status["reason"]["message"]) == ("error", "the build was cancelled")
        assert (await client.delete(f"/templates/{reference}")).status_code == 404
    assert world.server.registry.counters.created == before
    assert world.server._runtime.live_sandboxes == 0


async def test_a_build_outlives_its_client_and_ends_with_the_server(place):
    async with LocalServer(data_dir=place) as server:
        world, reference = World(server), name()
        template = AsyncTemplate().from_template("base").run_cmd("echo begun; sleep 1000")
        waiting = asyncio.create_task(world.build(template, reference))
        await _until_there(world, reference)
        await _until(world, reference, lambda status: any("begun" in e["message"] for e in status["logEntries"]))
        while not waiting.done():  # the SDK loses a cancellation that comes together with an answer
            waiting.cancel()
            await asyncio.wait([waiting], timeout=0.5)
        assert waiting.cancelled()
        assert (await _status(world, reference))["status"] == "building"
    assert server._runtime.live_sandboxes == 0


async def test_more_builds_than_may_run_at_once_take_turns(world):
    templates = [AsyncTemplate().from_template("base").run_cmd(f"echo {number} > n; sleep 0.2") for number in range(7)]
    names = [name() for _ in templates]
    together = [
        AsyncTemplate.build(template, one, **world.options) for template, one in zip(templates, names, strict=True)
    ]
    await asyncio.gather(*together)
    assert [await world.output(one, "cat n") for one in names] == [f"{number}\n" for number in range(7)]


async def test_a_template_in_use_is_not_deleted(world):
    reference = name()
    await world.build(AsyncTemplate().from_template("base").run_cmd("true"), reference)
    async with _client(world) as client:
        async with await world.create(reference):
            answer = await client.delete(f"/templates/{reference}")
            assert (answer.status_code, "running sandboxes" in answer.json()["message"]) == (400, True)
        assert (await client.delete(f"/templates/{reference}")).status_code == 204
        assert (await client.delete("/templates/base")).status_code == 403
    with pytest.raises(SandboxException, match="not found"):
        await world.create(reference)
    assert await AsyncTemplate.exists(reference, **world.options) is False


async def test_tags_and_names(world):
    reference = name()
    one = await world.build(AsyncTemplate().from_template("base").run_cmd("echo 1 > v"), f"{reference}:v1")
    two = await world.build(
        AsyncTemplate().from_template("base").run_cmd("echo 2 > v"), f"{reference}:v2", tags=["new"]
    )
    assert one.template_id == two.template_id
    assert await AsyncTemplate.exists(reference, **world.options)
    await AsyncTemplate.assign_tags(f"{reference}:v1", ["stable", "v2"], **world.options)
    tags = {tag.tag: tag.build_id for tag in await AsyncTemplate.get_tags(reference, **world.options)}
    assert tags == {"v1": one.build_id, "new": two.build_id, "stable": one.build_id, "v2": one.build_id}
    assert await world.output(f"{reference}:v2", "cat v") == "1\n"
    assert await world.output(f"{one.template_id}:new", "cat v") == "2\n"
    await AsyncTemplate.remove_tags(reference, ["new"], **world.options)
    with pytest.raises(SandboxException, match=f"tag 'new' does not exist for template '{reference}'"):
        await world.create(f"{reference}:new")
    for target in (":x", f"{reference}:", f"{reference}:nowhere"):
        with pytest.raises(TemplateException):
            await AsyncTemplate.assign_tags(target, "y", **world.options)
    with pytest.raises(TemplateException, match="Invalid tag"):
        await AsyncTemplate.assign_tags(f"{reference}:v1", str(uuid.uuid4()), **world.options)
    async with _client(world) as client:
        assert (await client.patch(f"/v2/templates/{reference}", json={"public": True})).status_code == 200
        assert (await client.get(f"/templates/aliases/{reference}")).json()["public"] is True
        shown = (await client.get(f"/templates/{reference}")).json()
        assert [build["status"] for build in shown["builds"]] == ["ready"]


async def test_what_a_template_starts_runs_in_each_sandbox(world):
    reference = name()
    template = (
        AsyncTemplate()
        .from_template("base")
        .set_envs({"PORT": "8111"})
        .set_start_cmd("python3 -m http.server $PORT", "curl -sf http://127.0.0.1:$PORT/")
    )
    await world.build(template, reference)
    script = "curl -so /dev/null -w '%{http_code}' http://127.0.0.1:8111/"
    assert await world.output(reference, script) == "200"
    async with await world.create(reference) as sandbox:  # its variables are the start command's, too
        assert (await sandbox.commands.run("pgrep -fc 'http.server 8111'")).stdout.strip() == "1"
    async with await world.create(reference, envs={"PORT": "8112"}) as sandbox:
        assert (await sandbox.commands.run(script.replace("8111", "8112"))).stdout == "200"


async def test_uploads_need_an_address_of_the_server(world):
    files = "ab" * 32
    reference = name()
    async with _client(world) as client, httpx.AsyncClient() as anybody:
        made = (await client.post("/v3/templates", json={"name": reference})).json()
        path = f"/templates/{made['templateID']}/files/"
        for bad in ("..%2f..%2fetc", "AB" * 32, "ab"):
            assert (await client.get(path + bad)).status_code in (400, 404)
        told = (await client.get(path + files)).json()
        assert told["present"] is False
        url = told["url"]
        for wrong in (url.replace("signature=", "signature=0"), url.replace(files, "cd" * 32), url.split("?")[0]):
            answer = await anybody.put(wrong, content=b"x")
            assert (answer.status_code, answer.json()["message"]) == (403, "invalid signature")
        assert (await anybody.get(url)).status_code == 401  # the address is for putting
        assert (await anybody.put(url, content=b"x")).status_code == 200
        assert (await client.get(path + files)).json()["present"] is True


async def test_an_upload_is_not_endless(world, monkeypatch):
    monkeypatch.setattr(uploads, "MAX_UPLOAD", 1000)
    async with _client(world) as client, httpx.AsyncClient() as anybody:
        made = (await client.post("/v3/templates", json={"name": name()})).json()
        files = "ef" * 32
        told = (await client.get(f"/templates/{made['templateID']}/files/{files}")).json()
        assert (await anybody.put(told["url"], content=b"x" * 1001)).status_code == 413
        assert (await client.get(f"/templates/{made['templateID']}/files/{files}")).json()["present"] is False


async def test_a_hostile_archive_stays_in_the_sandbox_of_its_build(world, tmp_path):
    outside = tmp_path / "outside"
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for path, kind, target, data in [
            ("src", tarfile.SYMTYPE, str(tmp_path), b""),
            ("src/outside", tarfile.REGTYPE, "", b"evil"),
            (f"../../../../..{outside}", tarfile.REGTYPE, "", b"evil"),
        ]:
            member = tarfile.TarInfo(path)
            member.type, member.linkname, member.size = kind, target, len(data)
            tar.addfile(member, io.BytesIO(data))
    files = "12" * 32
    reference = name()
    async with _client(world) as client:
        made = (await client.post("/v3/templates", json={"name": reference})).json()
        told = (await client.get(f"/templates/{made['templateID']}/files/{files}")).json()
        await client.put(told["url"], content=archive.getvalue())
        steps = [{"type": "COPY", "args": ["src", "dst", "", ""], "filesHash": files}]
        path = f"/v2/templates/{made['templateID']}/builds/{made['buildID']}"
        body = {"fromTemplate": "base", "steps": steps}
        assert (await client.post(path, json=body)).status_code == 202
        assert (await client.post(path, json=body)).status_code == 400  # it was started already
        await _until(world, reference, lambda status: status["status"] != "building")
    assert not outside.exists()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"fromTemplate": "base", "fromImage": "x"}, 400),
        ({"fromTemplate": "nowhere"}, 404),
        ({"fromTemplate": "base", "steps": [{"type": "HEALTHCHECK"}]}, 400),
        ({"fromTemplate": "base", "steps": [{"type": "COPY", "args": ["a", "b"], "filesHash": "../../etc"}]}, 400),
        ({"fromImage": "x", "fromImageRegistry": {"type": "registry", "username": "u"}}, 400),
        ({"fromImage": "x", "fromImageRegistry": {"type": "aws"}}, 501),
    ],
)
async def test_bad_builds_are_refused(world, body, status):
    async with _client(world) as client:
        made = (await client.post("/v3/templates", json={"name": name()})).json()
        answer = await client.post(f"/v2/templates/{made['templateID']}/builds/{made['buildID']}", json=body)
        assert (answer.status_code, answer.json()["code"]) == (status, status)


async def test_the_sync_sdk_builds_as_well(world):
    reference = name()
    template = Template().from_template("base").run_cmd("echo sync > f")
    await asyncio.to_thread(Template.build, template, reference, **world.options)
    assert await world.output(reference, "cat f") == "sync\n"
