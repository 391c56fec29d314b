"""Images from a real registry on the loopback address, and from ones that lie."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import tarfile
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from e2b import AsyncTemplate
from e2b.exceptions import BuildException

from managed_e2b.local.builds import reference
from managed_e2b.local.builds.registry import Credentials, PullError, Registries
from managed_e2b.local.server import LocalServer

from . import images
from .conftest import World
from .images import Image, Member, directory, layer, link

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = images.root_layer()


def name() -> str:
    return f"t-{uuid.uuid4().hex[:8]}"


async def test_an_image_becomes_a_template(world, registry):
    top = layer([Member("etc/.wh.debian_version"), Member("etc/top", b"top\n"), directory("srv/data")])
    registry.push("library/plain", Image([ROOT, top], ["FROM_IMAGE=yes"]), "1.0")
    reference = name()
    await world.build(AsyncTemplate().from_image("plain:1.0").run_cmd("echo $FROM_IMAGE > ran"), reference)
    script = (
        "id -un; pwd; cat ran /etc/top; ls /etc/debian_version /usr/bin/python3 2>&1 | grep -c 'No such';"
        "sudo id -u; umask; stat -c %U /home/user; echo $FROM_IMAGE"
    )
    expected = ["user", "/home/user", "yes", "top", "2", "0", "0022", "user", "yes"]
    assert (await world.output(reference, script)).splitlines() == expected


async def test_a_second_pull_takes_nothing_from_the_registry(world, registry, place):
    registry.push("library/again", Image([ROOT, layer([Member("again", uuid.uuid4().bytes)])]))
    template = AsyncTemplate().from_image("again")
    await world.build(template, name())
    assert len(world.said("Pulling layer")) in (1, 2)  # the root may be there already
    await world.build(template, name())
    assert world.said("CACHED [base]")
    # another image with the same root takes its own layer only
    registry.push("library/other", Image([ROOT, layer([Member("other", uuid.uuid4().bytes)])]))
    await world.build(AsyncTemplate().from_image("other"), name())
    assert len(world.said("Pulling layer")) == 1


async def test_what_was_pulled_outlives_the_server(registry, place):
    registry.push("library/lasting", Image([ROOT, layer([Member("lasting", uuid.uuid4().bytes)])]))
    cached = []
    for _ in range(2):
        async with LocalServer(data_dir=place, registry_mirrors={"docker.io": f"http://{registry.host}"}) as server:
            world = World(server)
            reference = name()
            await world.build(AsyncTemplate().from_image("lasting").run_cmd("cat /lasting > copy"), reference)
            assert await world.output(reference, "stat -c %s /lasting copy") == "16\n16\n"
            cached.append(len(world.said("CACHED")))
    assert cached == [0, 2]


async def test_a_registry_that_is_gone_is_not_needed_for_what_was_pulled(registry, place):
    registry.push("library/offline", Image([ROOT]))
    async with LocalServer(data_dir=place, registry_mirrors={"docker.io": f"http://{registry.host}"}) as server:
        await World(server).build(AsyncTemplate().from_image("offline").run_cmd("true"), name())
    async with LocalServer(data_dir=place, registry_mirrors={"docker.io": "http://127.0.0.1:1"}) as server:
        world = World(server)
        await world.build(AsyncTemplate().from_image("offline").run_cmd("true"), name())
        assert world.said("it is used as it was pulled before")
        assert len(world.said("CACHED [builder 1/1]")) == 1
        with pytest.raises(BuildException, match=r"cannot reach 127\.0\.0\.1:1"):
            await world.build(AsyncTemplate().from_image("offline").run_cmd("true"), name(), skip_cache=True)


async def test_a_dockerfile(world, registry, tmp_path):
    registry.push("library/docker", Image([ROOT]))
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "main.sh").write_text("echo main\n")
    template = AsyncTemplate(file_context_path=str(tmp_path)).from_dockerfile(
        "FROM docker\nARG NAME=x\nENV WHERE=/srv/$NAME\nWORKDIR /srv/x\nCOPY --chown=user app/ .\n"
        "RUN ls > listing && id -un >> listing\nUSER user\n"
    )
    reference = name()
    await world.build(template, reference)
    script = "pwd; id -un; cat listing; echo $WHERE; stat -c %U main.sh"
    assert (await world.output(reference, script)).splitlines() == [
        "/srv/x", "user", "listing", "main.sh", world.root, "/srv/x", "user"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([Member("a" * 300)], "File name too long"),
        ([Member("x/y", kind=tarfile.LNKTYPE, link="/nowhere")], "No such file"),
    ],
)
async def test_a_layer_that_cannot_be_unpacked(world, registry, members, message):
    registry.push("library/broken", Image([ROOT, layer(members)]), tag := uuid.uuid4().hex)
    with pytest.raises(BuildException, match=message):
        await world.build(AsyncTemplate().from_image(f"broken:{tag}"), name())


async def test_a_layer_cannot_leave_its_directory(world, registry, tmp_path):
    victim = tmp_path / "victim"
    hostile = layer(
        [
            Member(f"../../../../../../../..{victim}", b"evil"),
            Member(str(victim), b"evil"),
            link("out", str(tmp_path)),
            Member("out/victim", b"evil"),
            link("up", "../../../../../../../.."),
            Member(f"up{victim}", b"evil"),
            Member("etc/.wh..."),
            Member("dev/sda", kind=tarfile.BLKTYPE),
            Member("owned", b"x", uid=4_000_000_000 - 1),
        ]
    )
    registry.push("library/hostile", Image([ROOT, hostile]))
    reference = name()
    await world.build(AsyncTemplate().from_image("hostile"), reference)
    assert not victim.exists()
    assert world.said("1 device nodes of the image were left out")
    assert await world.output(reference, f"cat {victim}; stat -c %u /owned") == "evil0\n"


async def test_an_opaque_directory_and_a_file_that_became_a_directory(world, registry):
    lower = layer([directory("d"), Member("d/old", b"1"), Member("f", b"1"), directory("e"), Member("e/old", b"1")])
    upper = layer(
        [Member("d/.wh..wh..opq"), Member("d/new", b"2"), Member(".wh.f"), directory("f"), Member("f/in", b"2"),
         Member(".wh.e"), directory("e"), Member("e/new", b"2")]
    )  # fmt: skip
    registry.push("library/opaque", Image([ROOT, lower, upper]))
    reference = name()
    await world.build(AsyncTemplate().from_image("opaque"), reference)
    assert await world.output(reference, "cd /; ls d f e") == "d:\nnew\n\ne:\nnew\n\nf:\nin\n"


async def test_an_image_without_bash_says_so(world, registry):
    registry.push("library/empty", Image([layer([Member("etc/x", b"")])]))
    with pytest.raises(BuildException, match="An image must have /bin/bash"):
        await world.build(AsyncTemplate().from_image("empty"), name())
    registry.push("library/poor", Image([images.root_layer(["bash", "ls"])]))
    with pytest.raises(BuildException, match="the image has no mkdir, which a sandbox needs"):
        await world.build(AsyncTemplate().from_image("poor"), name())


async def test_an_image_that_is_not_there(world):
    for image, message in [
        ("nowhere:1", "was not found"),
        ("127.0.0.1:1/x", "cannot reach 127.0.0.1:1"),
        ("Bad Name", "invalid image"),
    ]:
        with pytest.raises(BuildException, match=message):
            await world.build(AsyncTemplate().from_image(image), name())


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Iterator[images.Registry]:
    """A registry over TLS that wants a password."""
    for program in ("docker-registry", "openssl"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} here (Debian: apt-get install {program})")
    place = tmp_path_factory.mktemp("private")
    certificate, key = place / "cert.pem", place / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1", "-addext",
         "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    # bcrypt of "secret-word", as `htpasswd -nbB robot secret-word` prints it
    (place / "htpasswd").write_text("robot:$2b$05$abcdefghijklmnopqrstuuUOabO4v2PoT/v47Y.znQK.9MsMDnesq\n")
    extra = f"  tls: {{certificate: {certificate}, key: {key}}}\n"
    extra += f"auth:\n  htpasswd: {{realm: test, path: {place}/htpasswd}}\n"
    with images.serve(place, extra) as host:
        yield images.Registry(host, "robot", "secret-word", certificate)


async def test_credentials_open_a_private_registry(private, monkeypatch, tmp_path):
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(private.authority))
    host = private.push("team/app", Image([layer([Member("x", b"1")])], ["A=1"])).partition("/")[0]
    registries = Registries({}, lambda: tmp_path)
    wanted = reference.parse(f"{host}/team/app")
    # This host is asked over plain HTTP unless told otherwise, and nobody's password goes over that.
    with pytest.raises(PullError):
        await registries.describe(wanted, Credentials("robot", "secret-word"))
    secured = Registries({host: f"https://{host}"}, lambda: tmp_path)
    with pytest.raises(PullError, match="is denied: it is private or does not exist"):
        await secured.describe(wanted, Credentials("robot", "secret-word"))  # a mirror gets no credentials
    monkeypatch.setattr(reference, "_is_loopback", lambda host: False)
    found = await registries.describe(wanted, Credentials("robot", "secret-word"))
    assert (found.env, len(found.archives)) == ({"A": "1"}, 1)
    for bad in (None, Credentials("robot", "wrong-word")):
        with pytest.raises(PullError, match="is denied") as failed:
            await registries.describe(wanted, bad)
        assert "wrong-word" not in str(failed.value)
    assert "secret-word" not in repr(Credentials("robot", "secret-word"))


def left_in(place: Path) -> list[str]:
    return [path.name for path in place.iterdir()]


@contextlib.contextmanager
def lying(answers: dict[str, tuple[str, bytes]]) -> Iterator[str]:
    """A registry that answers whatever it is told to: path → content type and body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind, body = answers.get(self.path, ("", b""))
            self.send_response(200 if kind else 404)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_what_does_not_have_its_digest_is_refused(tmp_path: Path):
    data = layer([Member("x", b"1")])
    config, manifest = Image([data]).parts()
    told = json.dumps(manifest).encode()
    answers = {
        "/v2/a/manifests/latest": (images.MANIFEST, told),
        f"/v2/a/manifests/sha256:{'0' * 64}": (images.MANIFEST, told),
        f"/v2/a/blobs/{images.digest(config)}": ("application/json", config),
        f"/v2/a/blobs/{images.digest(data)}": ("application/octet-stream", data[:-1] + b"!"),
    }
    registries = Registries({}, lambda: tmp_path)
    with lying(answers) as host:
        found = await registries.describe(reference.parse(f"{host}/a"), None)
        with pytest.raises(PullError, match="arrived damaged"):
            await registries.fetch(found, found.archives[0])
        answers[f"/v2/a/blobs/{images.digest(data)}"] = ("application/octet-stream", data + b"more")
        with pytest.raises(PullError, match="larger than the registry said"):
            await registries.fetch(found, found.archives[0])
        with pytest.raises(PullError, match="answered something else"):
            await registries.describe(reference.parse(f"{host}/a@sha256:{'0' * 64}"), None)
        answers[f"/v2/a/blobs/{images.digest(config)}"] = ("application/json", b"{}")
        with pytest.raises(PullError, match="arrived damaged"):
            await registries.describe(reference.parse(f"{host}/a"), None)
        for body in (b"not json", b"[]", b'{"mediaType": "x"}', json.dumps({**manifest, "config": 1}).encode()):
            answers["/v2/a/manifests/latest"] = (images.MANIFEST, body)
            with pytest.raises(PullError):
                await registries.describe(reference.parse(f"{host}/a"), None)
    assert left_in(tmp_path) == []


async def test_an_image_does_not_pass_for_another_whose_configuration_it_has(world):
    genuine, forged = (layer([Member("etc/whose", f"{whose}\n".encode())]) for whose in ("genuine", "forged"))
    config, manifest = Image([ROOT, genuine]).parts()
    first, _ = manifest["layers"]
    other = {"mediaType": images.LAYER, "digest": images.digest(forged), "size": len(forged)}
    answers = {
        "/v2/good/manifests/latest": (images.MANIFEST, json.dumps(manifest).encode()),
        "/v2/bad/manifests/latest": (images.MANIFEST, json.dumps({**manifest, "layers": [first, other]}).encode()),
    }
    for data in (ROOT, genuine, forged, config):
        for repository in ("good", "bad"):
            answers[f"/v2/{repository}/blobs/{images.digest(data)}"] = ("application/octet-stream", data)
    with lying(answers) as host:
        for repository, whose in (("bad", "forged"), ("good", "genuine")):
            reference = name()
            await world.build(AsyncTemplate().from_image(f"{host}/{repository}"), reference)
            assert await world.output(reference, "cat /etc/whose") == f"{whose}\n"


async def test_the_image_of_this_architecture_is_chosen(registry, tmp_path):
    registry.push("team/one", Image([layer([Member("x", b"1")])]))
    source = registry.client("team/one")
    _, manifest = Image([layer([Member("x", b"1")])]).parts()
    told = json.dumps(manifest).encode()
    entry = {"mediaType": images.MANIFEST, "digest": images.digest(told), "size": len(told)}
    kinds = [("linux", "s390x"), ("linux", images.architecture())]
    index = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [{**entry, "platform": {"os": os, "architecture": arch}} for os, arch in kinds],
    }
    source.set_manifest("many", json.dumps(index))
    index["manifests"] = index["manifests"][:1]
    source.set_manifest("foreign", json.dumps(index))
    registries = Registries({}, lambda: tmp_path)
    assert await registries.describe(reference.parse(f"{registry.host}/team/one:many"), None)
    with pytest.raises(PullError, match=f"not there for linux/{images.architecture()}"):
        await registries.describe(reference.parse(f"{registry.host}/team/one:foreign"), None)
