"""Checkpoints, data, a tokenizer and a model that lie in a bucket: against a server of S3's protocol."""

import gzip
import os
import re
import signal
import time
import urllib.request
from pathlib import Path

import boto3
import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from moto.server import ThreadedMotoServer
from ranks import start_small, titanlite
from small_runs import SMALL, losses

from titanlite.checkpoint.step_folders import encode_manifest
from titanlite.config.schema import Dataset
from titanlite.config.storage import listing
from titanlite.data.sources.files import open_source

pytestmark = pytest.mark.slow
MIRROR = "--checkpoint.mirror", "s3://bucket/run"
URLS = {"s3://no": "not exist", MIRROR[1]: "Key Id", "run": "no URL", "memory://a": "outlive", "gs://a": "gcsfs"}


@pytest.fixture
def server(tmp_path, monkeypatch):
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    server._port = server.get_host_and_port()[1]  # where it starts again
    settings = {"ACCESS_KEY_ID": "us", "SECRET_ACCESS_KEY": "us", "DEFAULT_REGION": "us-east-1", "MAX_ATTEMPTS": "1"}
    for name, value in {**settings, "ENDPOINT_URL": f"http://127.0.0.1:{server._port}"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("TITANLITE_CACHE", str(tmp_path / "cache"))
    tell("reset")
    bucket().mkdir("bucket")
    yield server
    tell("reset-auth", b"inf")
    server.stop()


def tell(what: str, body: bytes = b"") -> None:
    url = f"{os.environ['AWS_ENDPOINT_URL']}/moto-api/{what}"
    urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "text/plain"}, method="POST")).close()


def bucket():
    return fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)


def there(ending: str = "") -> dict[str, bytes]:
    """What the mirror holds: path -> content."""
    storage = bucket()
    found = [p for p in listing(storage, "bucket/run") if p.endswith(ending) and not p.startswith(".titanlite")]
    return {p: storage.cat(f"bucket/run/{p}") for p in found}  # without what a start tries to write


def files(folder: Path, ending: str = "") -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob(f"step-*/*{ending}")}


def damage(step: int) -> None:
    storage, name = bucket(), f"bucket/run/step-{step:08d}/__0_0.distcp"
    content = storage.cat(name)
    storage.pipe(name, content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])


def test_another_machine_goes_on_from_the_newest_good_checkpoint_on_another_layout(server, tmp_path):
    keys = *MIRROR, "--lr_scheduler.total_steps", 20, "--checkpoint.interval", 3, "--checkpoint.keep_latest_k", 2
    slow = "--checkpoint.mirror_mbps", 40  # an old checkpoint is under way when the run ends
    start_small(tmp_path / "one", *keys, "--training.steps", 10, *slow, ranks=2).ends_with(0)
    kept = ["step-00000009/manifest.json", "step-00000010/manifest.json"]
    assert (sorted(there("manifest.json")), there()) == (kept, files(tmp_path / "one/checkpoint"))
    damage(10)
    bucket().pipe("bucket/run/step-00000011/manifest.json", encode_manifest({"step": 11}))
    start_small(tmp_path / "other", *keys, "--model.dim", 32).ends_with(2)  # nothing is brought that does not fit
    assert not files(tmp_path / "other")
    assert "Resumed after step 9 " in start_small(tmp_path / "two", *keys).ends_with(0)
    assert losses(tmp_path / "two")[10] == pytest.approx(losses(tmp_path / "one")[10], rel=1e-5)  # sums of two ranks
    back = start_small(tmp_path / "back", *keys, "--checkpoint.load_step", 9, "--training.steps", 10)
    assert "Resumed after step 9 " in back.ends_with(0)
    assert sorted(there("manifest.json")) == kept
    titanlite("generate", "--checkpoint", "s3://bucket/run", "--max-new-tokens", 3)
    assert str(tmp_path) not in titanlite("verify", "s3://bucket/run")
    bucket().copy(*(f"bucket/run/{name}" for name in kept))  # as if another process had saved step 10
    assert "started twice" in start_small(tmp_path / "back", *keys, "--training.steps", 10).ends_with(4)
    damage(9)  # and step 10 has another manifest
    for _ in range(2):  # now, and at every later start
        start_small(tmp_path / "three", *keys).ends_with(4)


def test_a_copy_that_is_cut_short_is_no_checkpoint_and_is_made_by_the_next_start(server, tmp_path):
    words = *MIRROR, "--training.steps", 5
    world, deadline = start_small(tmp_path / "one", *words, "--checkpoint.mirror_mbps", 0.1), time.monotonic() + 60
    while not there():
        assert time.monotonic() < deadline
    world.kill(0, signal.SIGKILL)
    world.wait()
    assert there("manifest.json") == {}
    bucket().pipe("bucket/run/other/step-00000001/.metadata", b"of another run, which sends it now")
    start_small(tmp_path / "one", *words).ends_with(0)
    assert there().keys() - files(tmp_path / "one/checkpoint").keys() == {"other/step-00000001/.metadata"}


def test_a_run_goes_on_without_the_server_and_the_last_copy_decides_how_it_ends(server, tmp_path, request):
    words = *MIRROR, "--checkpoint.interval", 20, "--checkpoint.keep_latest_k", 2, "--checkpoint.timeout_seconds", 2
    world = start_small(tmp_path / "one", *words, "--training.steps", 10**6)
    request.addfinalizer(world.close)
    world.wait_for("step +1/")
    server.stop()
    world.wait_for("saved step 40 ")
    server.start()
    world.wait_for("copied s3://")
    server.stop()
    world.kill(0, signal.SIGTERM)
    assert "s3://bucket/run" in world.ends_with(4)
    server.start()
    start_small(tmp_path / "one", *words, "--training.steps", 1).ends_with(0)
    assert there() == files(tmp_path / "one/checkpoint")


@pytest.mark.parametrize(("url", "said"), URLS.items())
def test_a_url_that_cannot_be_used_is_said_before_the_start(server, tmp_path, url, said):
    tell("reset-auth", b"0" if url == MIRROR[1] else b"inf")  # 0: from now on, keys are looked at
    data = "--dataset.source", "text", "--dataset.path", url
    words = start_small(tmp_path / "one", "--checkpoint.mirror", url, *data).ends_with(2)
    assert ["checkpoint.mirror" in words, "dataset.path" in words, said in words, "Traceback" in words] == [1, 1, 1, 0]
    assert not (tmp_path / "one").exists()


def test_data_a_tokenizer_and_a_model_are_the_same_in_a_bucket(server, tmp_path, caplog, monkeypatch):
    """One source of each kind: the rows of a run, and so its losses, are those from local files, bitwise."""
    here, job, texts = tmp_path / "data", tmp_path / "job.toml", [f"text {i} " * 60 for i in range(200)]
    lines = "".join(f'{{"text": "{text}"}}\n' for text in texts).encode()
    (here / "parts").mkdir(parents=True)
    for name in ("a.jsonl", "a.jsonl.gz", "a.txt", *(f"parts/{i}" for i in range(65))):
        (here / name).write_bytes(gzip.compress(lines) if name.endswith("gz") else lines)
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), here / "a.parquet", row_group_size=20)
    job.write_text(SMALL)
    source = "--dataset.source", "jsonl", "--dataset.path", here / "*.jsonl"
    titanlite("prepare", "--job.config_file", job, *source, "--out", here / "shards")
    (here / "tokenizer.model").write_bytes(Path("assets/tokenizer/tokenizer.model").read_bytes())
    bucket().put(str(here), "bucket", recursive=True)
    for folder in ("data/", "data/parts/", "data/shards/"):  # as consoles make them
        boto3.client("s3").put_object(Bucket="bucket", Key=folder)
    out = {name: tmp_path / name for name in ("local", "remote")}
    for name, place, steps, more in (("local", here, 12, ()), ("remote", "s3://bucket/data", 10, MIRROR),
                                     ("remote", here, 12, MIRROR), ("local", here, 12, MIRROR)):  # fmt: skip
        kinds = {"*.jsonl": "jsonl", "*.gz": "jsonl", "*.txt": "text", "*.parquet": "parquet", "shards": "shards"}
        sources = (f'[[dataset.sources]]\nsource = "{kinds[p]}"\npath = "{place}/{p}"\n' for p in kinds)
        job.write_text(f'{SMALL}\n[tokenizer]\npath = "{place}/tokenizer.model"\n{"".join(sources)}')
        words = ["--training.steps", steps, "--lr_scheduler.total_steps", 12, "--checkpoint.last_save_in_hf", *more]
        words = ["train", "--job.config_file", job, "--job.dump_folder", out[name], *words]
        titanlite(*words, code=2 if (name, more) == ("local", MIRROR) else 0)  # the mirror is another run's by then
    assert losses(out["local"]) == losses(out["remote"])
    gets = re.findall(r'"GET /bucket/data/(\S+) HTTP', caplog.text)
    assert len(gets) == len({*gets}) > 6  # for all rows of both starts, because each file is smaller than a block
    monkeypatch.setenv("TITANLITE_CACHE_GB", "1e-9")  # one block in each of the 64 sets
    parts = open_source(Dataset(source="text", path="s3://bucket/data/parts/**"))
    assert "".join(map(str, parts)) == lines.decode() * 65
    assert len([*tmp_path.glob("cache/blocks/*/[0-9]*")]) <= 64
    bucket().put(str(out["local"] / "final_hf"), "bucket/model", recursive=True)
    boto3.client("s3").put_object(Bucket="bucket", Key="model/")
    for name, model in (("1", out["local"] / "final_hf"), ("2", "s3://bucket/model")):
        titanlite("import", "--hf", model, "--out", tmp_path / name)
    assert files(tmp_path / "1", ".distcp") == files(tmp_path / "2", ".distcp")
