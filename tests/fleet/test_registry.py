"""Bundles in a real OCI registry: tags, digests, passwords, tokens, TLS, cut connections."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import msgspec
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from mqtt_fixtures import make_bundle
from registry_fixtures import (
    PASSWORD,
    USER,
    Authority,
    CutLine,
    host_that_says,
    registry,
    token_server,
)

from device.update.bundle import BundleInfo
from toolkit.cli.main import tandem
from toolkit.errors import RegistryError
from toolkit.fleet.registry import client as client_module
from toolkit.fleet.registry import transfer
from toolkit.fleet.registry.client import RegistryClient
from toolkit.fleet.registry.credentials import Credentials, find_credentials
from toolkit.fleet.registry.manifest import (
    BUNDLE_TYPE,
    MANIFEST_TYPE,
    Descriptor,
    piece_names,
    pieces_in,
)
from toolkit.fleet.registry.reference import parse_reference
from toolkit.fleet.registry.transfer import pull, push, resolve
from toolkit.fleet.trust.repository import FleetRepository, make_repository

MIB = 1024**2


def silent(step: str, share: float) -> None:
    """Discard progress."""


def run(*arguments: str | Path, **environment: str) -> Result:
    return CliRunner().invoke(tandem, [str(one) for one in arguments], env=environment)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("bundle"), engine_bytes=3 * MIB)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with registry(tmp_path_factory.mktemp("registry")) as address:
        yield address


@pytest.fixture(autouse=True)
def quick_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "FIRST_PAUSE_S", 0.01)


def plain(host: str, name: str) -> RegistryClient:
    return RegistryClient(parse_reference(f"oci://{host}/{name}"), plain_http=True)


# -- references


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("oci://h/a", "oci://h/a:latest"),
        ("oci://h:5000/a/b-c/d_e:1.0", "oci://h:5000/a/b-c/d_e:1.0"),
        (f"oci://h/a@sha256:{'0' * 64}", f"oci://h/a@sha256:{'0' * 64}"),
        (f"oci://[::1]:5000/a:t@sha256:{'0' * 64}", f"oci://[::1]:5000/a:t@sha256:{'0' * 64}"),
    ],
)
def test_a_reference_is_read_and_written(text: str, shown: str) -> None:
    assert str(parse_reference(text)) == shown


@pytest.mark.parametrize(
    "text",
    ["h/a:1", "oci://h", "oci://h/", "oci://h/A", "oci://h/a:", "oci://h/a@sha256:0", "oci://h/../a",
     "oci://h:70000/a", "oci://user@h/a", "oci://h/a?x=1", "oci://h/a:b/c", "oci://h/a\n"],
)  # fmt: skip
def test_what_names_nothing_is_refused(text: str) -> None:
    with pytest.raises(RegistryError, match="names nothing in a registry"):
        parse_reference(text)


@given(st.text())
def test_any_text_is_a_reference_or_refused(text: str) -> None:
    for candidate in (text, f"oci://{text}", f"oci://h/{text}"):
        try:
            again = parse_reference(str(parse_reference(candidate)))
        except RegistryError:
            continue
        assert again.digest_or_tag


def test_credentials_come_from_the_environment_or_the_docker_login(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    assert find_credentials("h", {}, config) is None
    config.write_text('{"auths": {"h": {"auth": "dTpwOjE="}, "x": {}}, "credsStore": "other"}')
    assert find_credentials("h", {}, config) == Credentials("u", "p:1")
    assert find_credentials("x", {}, config) is None
    both = {"TANDEM_REGISTRY_USER": "a", "TANDEM_REGISTRY_PASSWORD": "b"}
    assert find_credentials("h", both, config) == Credentials("a", "b")
    assert "b" not in repr(Credentials("a", "b")).replace("Credentials", "")
    with pytest.raises(RegistryError, match="TANDEM_REGISTRY_PASSWORD is not set"):
        find_credentials("h", {"TANDEM_REGISTRY_USER": "a"}, config)
    config.write_text('{"auths": {"h": {"auth": "%%%"}}}')
    with pytest.raises(RegistryError, match="is damaged"):
        find_credentials("h", {}, config)


# -- push and pull


def test_a_bundle_goes_there_and_comes_back(host: str, bundle: Path, tmp_path: Path) -> None:
    reference = f"oci://{host}/robots/robot:1.0"
    pushed = run("bundle", "push", bundle, reference, "--plain-http", "--json")
    assert pushed.exit_code == 0, pushed.output
    first = json.loads(pushed.output)
    assert first["sent_bytes"] == first["bytes"] == bundle.stat().st_size
    again = json.loads(run("bundle", "push", bundle, reference, "--plain-http", "--json").output)
    assert (again["digest"], again["sent_bytes"]) == (first["digest"], 0)
    for name in (reference, f"oci://{host}/robots/robot@{first['digest']}"):
        out = tmp_path / "out.bundle"
        pulled = run("bundle", "pull", name, "-o", out, "--plain-http", "--json")
        assert pulled.exit_code == 0, pulled.output
        assert json.loads(pulled.output)["reference"].endswith(first["digest"])
        assert out.read_bytes() == bundle.read_bytes()
        assert [path.name for path in tmp_path.iterdir()] == ["out.bundle"]


def test_layers_carry_the_names_under_which_other_clients_write_them(
    host: str, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ORAS pulls: each layer of the manifest goes into the file that its title names."""
    for piece_bytes, names in ((MIB, ["", ".000", ".001", ".002", ".003"]), (16 * MIB, [""])):
        monkeypatch.setattr(transfer, "PIECE_BYTES", piece_bytes)
        reference = f"oci://{host}/titles/robot:{piece_bytes}"
        assert run("bundle", "push", bundle, reference, "--plain-http").exit_code == 0
        url = f"http://{host}/v2/titles/robot"
        request = Request(f"{url}/manifests/{piece_bytes}", headers={"Accept": MANIFEST_TYPE})
        folder = tmp_path / str(piece_bytes)
        folder.mkdir()
        with urlopen(request) as answer:
            layers = json.load(answer)["layers"]
        for layer in layers:
            with urlopen(f"{url}/blobs/{layer['digest']}") as answer:
                title = layer["annotations"]["org.opencontainers.image.title"]
                (folder / title).write_bytes(answer.read())
        files = sorted(folder.iterdir())
        expected = [f"good-1.bundle{name}" for name in names[1:] or names]
        assert [path.name for path in files] == expected
        assert b"".join(path.read_bytes() for path in files) == bundle.read_bytes()


@given(st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1), st.integers(1, 2000))
def test_names_of_pieces_are_no_paths_and_sort_in_order(name: str, count: int) -> None:
    info = BundleInfo(format=1, name=name, version="../1", profile="p", files=())
    names = piece_names(info, count)
    assert len(set(names)) == count
    assert list(names) == sorted(names)
    assert all(Path(one).name == one and not one.startswith((".", "-")) for one in names)


def test_a_tag_is_resolved_once_at_publication(host: str, tmp_path: Path) -> None:
    one = make_bundle(tmp_path / "a", engine_bytes=5000)
    two = make_bundle(tmp_path / "b", engine_bytes=6000, version="2")
    reference = f"oci://{host}/moving:tag"
    make_repository(tmp_path / "fleet")
    run("bundle", "push", one, reference, "--plain-http")
    arguments = ("fleet", "publish", reference, "--plain-http", "--fleet", tmp_path / "fleet")
    published = run(*arguments, "--json")
    assert published.exit_code == 0, published.output
    first = json.loads(published.output)
    assert first["source"].startswith(f"oci://{host}/moving@sha256:")
    run("bundle", "push", two, reference, "--plain-http")  # the tag moves
    repository = FleetRepository(tmp_path / "fleet")
    target = repository.target(first["target"])
    assert target is not None
    assert target.custom is not None
    assert target.custom["source"] == first["source"]
    assert target.length == one.stat().st_size
    pulled = run("bundle", "pull", first["source"], "-o", tmp_path / "p", "--plain-http")
    assert pulled.exit_code == 0, pulled.output
    assert (tmp_path / "p").read_bytes() == one.read_bytes()
    # From a file the same release stays what it is.
    version = (tmp_path / "fleet/repository/metadata/timestamp.json").read_bytes()
    assert run("fleet", "publish", one, "--fleet", tmp_path / "fleet").exit_code == 0
    assert (tmp_path / "fleet/repository/metadata/timestamp.json").read_bytes() == version
    second = json.loads(run(*arguments, "--json").output)
    assert second["version"] == "2"


@pytest.mark.parametrize("after_bytes", [200_000, 1_500_000])
def test_a_pull_goes_on_where_the_connection_was_cut(
    host: str, bundle: Path, tmp_path: Path, after_bytes: int
) -> None:
    push(plain(host, "cut:1"), bundle, silent)
    line = CutLine(host, after_bytes=after_bytes, cuts=4)
    client = plain(line.host, "cut:1")
    out = tmp_path / "out"
    pull(client, resolve(client), out, silent)
    line.close()
    assert out.read_bytes() == bundle.read_bytes()
    assert line.cuts_left < 4 if after_bytes > MIB else line.cuts_left == 0
    size = bundle.stat().st_size
    assert size < line.carried < 1.3 * size  # what has come is not asked for again


def test_a_pull_that_was_killed_goes_on_with_its_part(
    host: str, bundle: Path, tmp_path: Path
) -> None:
    client = plain(host, "part:1")
    push(client, bundle, silent)
    resolved = resolve(client)
    digits = resolved.digest[7:19]
    half = bundle.read_bytes()[: 2 * MIB]
    (tmp_path / f"out.{digits}.part").write_bytes(half)
    line = CutLine(host, after_bytes=1, cuts=0)
    pull(plain(line.host, "part:1"), resolved, tmp_path / "out", silent)
    line.close()
    assert (tmp_path / "out").read_bytes() == bundle.read_bytes()
    assert line.carried < bundle.stat().st_size - len(half) + 20_000
    # A part with other bytes is found by the hash of the piece, and is not kept.
    (tmp_path / f"out.{digits}.part").write_bytes(b"x" * 1000)
    with pytest.raises(RegistryError, match="has another hash"):
        pull(client, resolved, tmp_path / "out", silent)
    pull(client, resolved, tmp_path / "out", silent)
    for damaged in (b"x" * resolved.bytes, bundle.read_bytes() + b"x"):
        (tmp_path / f"out.{digits}.part").write_bytes(damaged)
        pull(client, resolved, tmp_path / "out", silent)
        assert (tmp_path / "out").read_bytes() == bundle.read_bytes()


def test_a_cut_connection_costs_one_piece_of_a_push(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PIECE_BYTES", MIB)
    bundle = make_bundle(tmp_path / "in", "pushed", engine_bytes=6 * MIB)
    line = CutLine(host, after_bytes=2_500_000, cuts=2)
    pushed = push(plain(line.host, "pushed:1"), bundle, silent)
    line.close()
    assert line.cuts_left == 0
    assert line.carried < bundle.stat().st_size + 2 * MIB + 50_000
    client = plain(host, "pushed:1")
    resolved = resolve(client)
    assert (resolved.digest, len(resolved.pieces)) == (pushed.digest, 7)
    pull(client, resolved, tmp_path / "out", silent)
    assert (tmp_path / "out").read_bytes() == bundle.read_bytes()
    # After a kill: whole pieces stay, a damaged one is fetched again.
    content = bytearray(bundle.read_bytes()[: 3 * MIB + 1000])
    content[MIB + 5] ^= 1
    (tmp_path / f"out.{resolved.digest[7:19]}.part").write_bytes(content)
    rest = CutLine(host, after_bytes=1, cuts=0)
    pull(plain(rest.host, "pushed:1"), resolved, tmp_path / "out", silent)
    rest.close()
    assert (tmp_path / "out").read_bytes() == bundle.read_bytes()
    assert rest.carried < bundle.stat().st_size - MIB + 50_000


def test_a_push_over_a_slow_line_is_no_time_out(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece may take longer than the time-out, which is for a line that carries nothing."""
    monkeypatch.setattr(client_module, "TIMEOUT_S", 3.0)
    bundle = make_bundle(tmp_path / "in", "slow", engine_bytes=24 * MIB)
    line = CutLine(host, after_bytes=1, cuts=0, bytes_per_s=4.0 * MIB)
    pushed = push(plain(line.host, "slow:1"), bundle, silent)
    line.close()
    assert pushed.sent_bytes == bundle.stat().st_size
    assert line.carried < pushed.sent_bytes + MIB  # at the first try


def test_a_new_version_shares_its_pieces_with_the_one_before(
    host: str, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PIECE_BYTES", MIB)
    first = push(plain(host, "shared:1"), bundle, silent)
    second = push(plain(host, "shared:2"), bundle, silent)
    assert (first.sent_bytes, second.sent_bytes) == (bundle.stat().st_size, 0)


def test_a_registry_that_is_away_is_a_sentence_after_a_few_tries(
    bundle: Path, tmp_path: Path
) -> None:
    with registry(tmp_path / "gone") as address:
        pass
    with pytest.raises(RegistryError, match="cannot be reached, 6 tries failed"):
        resolve(plain(address, "a:1"))


# -- what must not pass


def test_a_wrong_digest_never_becomes_a_bundle(host: str, bundle: Path, tmp_path: Path) -> None:
    client = plain(host, "wrong:1")
    pushed = push(client, bundle, silent)
    second = f"sha256:{'0' * 64}"
    with pytest.raises(RegistryError, match="has no wrong"):
        resolve(plain(host, f"wrong@{second}"))
    # The registry's own file is damaged: it is served under a digest that it does not have.
    data = tmp_path / "data"
    with registry(tmp_path) as address:
        local = plain(address, "wrong:1")
        push(local, bundle, silent)
        blobs = data / "docker/registry/v2/blobs/sha256"
        blob = blobs / pushed.sha256[:2] / pushed.sha256 / "data"  # it is one piece
        content = bytearray(blob.read_bytes())
        content[5000] ^= 1
        blob.write_bytes(content)
        with pytest.raises(RegistryError, match="has another hash"):
            pull(local, resolve(local), tmp_path / "out", silent)
        # So is its manifest: what comes has not the digest that was asked for.
        held = pushed.digest.removeprefix("sha256:")
        manifest = blobs / held[:2] / held / "data"
        manifest.write_bytes(manifest.read_bytes().replace(b'"1"', b'"2"'))
        by_digest = plain(address, f"wrong@{pushed.digest}")
        with pytest.raises(RegistryError):
            resolve(by_digest)
    assert not (tmp_path / "out").exists()
    (part,) = tmp_path.glob("*.part")
    assert part.stat().st_size == 0


def test_a_damaged_bundle_is_not_pushed(host: str, bundle: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.bundle"
    shutil.copy(bundle, broken)
    with broken.open("r+b") as file:
        file.seek(MIB)
        file.write(b"?")
    result = run("bundle", "push", broken, f"oci://{host}/broken:1", "--plain-http")
    assert result.exit_code == 1
    assert "does not match its sha256" in str(result.exception)
    with pytest.raises(RegistryError, match="has no broken 1"):
        resolve(plain(host, "broken:1"))


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        (b"no json", "cannot be read"),
        (b'{"schemaVersion": 2, "layers": []}', "is no bundle"),
        (b'{"schemaVersion": 2, "layers": [{"mediaType": "a", "digest": "d", "size": 1}]}',
         "cannot be read"),
        (b'{"schemaVersion": 2, "artifactType": "x/y", "layers": [{"mediaType": "a", "size": 1, '
         b'"digest": "sha256:%s"}]}' % (b"0" * 64), "is no bundle, but 'x/y' with 1 layers"),
    ],
)  # fmt: skip
def test_what_is_no_bundle_is_refused(manifest: bytes, says: str) -> None:
    with pytest.raises(RegistryError, match=says):
        pieces_in(manifest, parse_reference("oci://h/a"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda below: st.lists(below, max_size=3)
    | st.dictionaries(
        st.sampled_from(["schemaVersion", "layers", "mediaType", "digest", "size", "config"]),
        below, max_size=4,
    ),
    max_leaves=8,
)  # fmt: skip


@given(st.binary(max_size=60) | JSON.map(msgspec.json.encode))
def test_any_manifest_is_one_of_a_bundle_or_refused(data: bytes) -> None:
    try:
        pieces = pieces_in(data, parse_reference("oci://h/a"))
    except RegistryError:
        return
    assert all(piece.media_type == BUNDLE_TYPE for piece in pieces)


@pytest.mark.parametrize(("size", "fits"), [(1, True), (8 * 1024**3, True), (0, False),
                                            (8 * 1024**3 + 1, False)])  # fmt: skip
def test_a_bundle_has_a_size_that_a_disk_can_take(size: int, fits: bool) -> None:
    layer = {"mediaType": BUNDLE_TYPE, "digest": f"sha256:{'0' * 64}", "size": size}
    data = msgspec.json.encode({"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "layers": [layer]})
    reference = parse_reference("oci://h/a")
    if fits:
        (piece,) = pieces_in(data, reference)
        expected = f"sha256:{'0' * 64}"
        assert piece == Descriptor(media_type=BUNDLE_TYPE, digest=expected, size=size)
        return
    with pytest.raises(RegistryError, match="allowed are 1 to"):
        pieces_in(data, reference)


# -- who may


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def test_a_password_is_asked_for_over_tls(
    authority: Authority, bundle: Path, tmp_path: Path
) -> None:
    good = {"TANDEM_REGISTRY_USER": USER, "TANDEM_REGISTRY_PASSWORD": PASSWORD}
    with registry(tmp_path / "r", tls=authority, passwords=True) as address:
        push_words = ("bundle", "push", bundle, f"oci://{address}/a:1")
        stranger = run(*push_words, **good)
        assert "cannot be trusted" in str(stranger.exception)
        trusted = (*push_words, "--ca", authority.pem)
        nobody = run(*trusted, DOCKER_CONFIG=str(tmp_path))
        assert "does not let nobody do this with a (status 401" in str(nobody.exception)
        wrong = run(*trusted, **{**good, "TANDEM_REGISTRY_PASSWORD": "wrong"})
        assert "does not let 'robot' do this" in str(wrong.exception)
        assert "wrong" not in str(wrong.exception)
        result = run(*trusted, **good)
        assert result.exit_code == 0, result.exception
        out = tmp_path / "out"
        pulled = run(
            "bundle", "pull", f"oci://{address}/a:1", "-o", out, "--ca", authority.pem, **good
        )
        assert pulled.exit_code == 0, pulled.exception
    assert out.read_bytes() == bundle.read_bytes()


def test_a_token_is_fetched_where_the_registry_says(
    authority: Authority, bundle: Path, tmp_path: Path
) -> None:
    with (
        token_server(authority) as realm,
        registry(tmp_path / "r", tokens=(authority, realm)) as address,
    ):
        reference = parse_reference(f"oci://{address}/robots/a:1")
        client = RegistryClient(reference, Credentials(USER, PASSWORD), plain_http=True)
        push(client, bundle, silent)
        pull(client, resolve(client), tmp_path / "out", silent)
        wrong = RegistryClient(reference, Credentials(USER, "wrong"), plain_http=True)
        with pytest.raises(RegistryError, match="does not let 'robot' do this"):
            resolve(wrong)
    assert (tmp_path / "out").read_bytes() == bundle.read_bytes()


def test_a_line_that_is_cut_while_tls_begins_is_tried_again(
    authority: Authority, tmp_path: Path
) -> None:
    with registry(tmp_path / "r", tls=authority) as address:
        line = CutLine(address, after_bytes=100, cuts=2)
        client = RegistryClient(parse_reference(f"oci://{line.host}/a:1"), ca=authority.pem)
        with pytest.raises(RegistryError, match="has no a 1"):
            resolve(client)
        line.close()
    assert line.cuts_left == 0


def test_a_host_that_a_registry_sends_on_to_gets_no_password() -> None:
    """Neither at once, nor where it asks for one, nor at the token server that it names."""
    requests: list[str] = []

    def storage(_: str, path: str) -> tuple[int, dict[str, str], bytes]:
        requests.append(path)
        if path.startswith("/token"):
            return 200, {}, b'{"token": "t"}'
        return 401, {"WWW-Authenticate": f'Bearer realm="http://{spoken.host}/token"'}, b""

    def redirect(_: str, path: str) -> tuple[int, dict[str, str], bytes]:
        return 307, {"Location": f"http://{spoken.host}{path}"}, b""

    with host_that_says(storage) as spoken, host_that_says(redirect) as registry_host:
        reference = parse_reference(f"oci://{registry_host.host}/a:1")
        client = RegistryClient(reference, Credentials(USER, PASSWORD), plain_http=True)
        with pytest.raises(RegistryError, match="does not let 'robot' do this"):
            resolve(client)
    assert requests == ["/v2/a/manifests/1"]
    assert not any("Authorization" in headers for headers in spoken.headers)


@pytest.mark.parametrize(
    ("headers", "body", "says"),
    [
        ({"Location": "http://["}, b"", "which is no address"),
        ({"Location": "http://h:99999/"}, b"", "which is no address"),
        ({"Location": "file:///etc/passwd"}, b"", "which is not protected by TLS"),
        ({"WWW-Authenticate": 'Bearer realm="http://["'}, b"", "which is not protected by TLS"),
        ({"WWW-Authenticate": 'Bearer realm="TOKEN"'}, b'{"token": "a\\r\\nb"}', "no header may"),
        ({"WWW-Authenticate": 'Bearer realm="TOKEN"'}, b'{"token": "\xff"}', "gives no token"),
        ({}, b'{"errors": [{"code": "\xff"}]}', "has no a 1"),
    ],
)  # fmt: skip
def test_what_a_registry_says_wrongly_is_a_sentence(
    headers: dict[str, str], body: bytes, says: str
) -> None:
    status = 307 if "Location" in headers else 401 if headers else 404

    def answer(_: str, path: str) -> tuple[int, dict[str, str], bytes]:
        if path == "/token":
            return 200, {}, body
        token = f"http://{spoken.host}/token"
        return status, {key: text.replace("TOKEN", token) for key, text in headers.items()}, body

    with host_that_says(answer) as spoken, pytest.raises(RegistryError, match=says):
        resolve(plain(spoken.host, "a:1"))


def test_a_registry_is_the_same_with_its_port_and_in_capitals() -> None:
    client = RegistryClient(parse_reference("oci://Registry.example/a:1"))
    is_own = client._is_own
    assert is_own("https://registry.example:443/v2/a/blobs/uploads/1")
    assert not is_own("http://registry.example/v2/a/blobs/uploads/1")
    assert not is_own("https://registry.example:8443/v2/a/blobs/uploads/1")
    assert not is_own("https://registry.example.org/v2/a/blobs/uploads/1")


def test_no_password_goes_to_a_token_server_without_tls(
    authority: Authority, tmp_path: Path
) -> None:
    with (
        token_server(authority) as realm,
        registry(tmp_path / "r", tls=authority, tokens=(authority, realm)) as address,
    ):
        client = RegistryClient(
            parse_reference(f"oci://{address}/a:1"), Credentials(USER, PASSWORD), ca=authority.pem
        )
        with pytest.raises(RegistryError, match="no password is sent there"):
            resolve(client)
