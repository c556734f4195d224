"""Parquet files that cannot be read are named."""

import numpy as np
import pytest
from data_helpers import write_parquet

from titanlite.config.errors import UserError
from titanlite.config.schema import Dataset
from titanlite.data.sources import open_source
from titanlite.data.sources.base import Sequential


def sequential(dataset) -> Sequential:
    source = open_source(dataset)
    assert isinstance(source, Sequential)
    return source


def test_parquet_without_the_column_or_rows_is_an_error(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["fine"], id=[1])
    with pytest.raises(UserError, match=r"a\.parquet: no field 'body' .* there are: 'id', 'text'"):
        open_source(Dataset(source="parquet", path=str(tmp_path / "a.parquet"), text_column="body"))
    write_parquet(tmp_path / "lists.parquet", [["one"], ["two"]])
    with pytest.raises(UserError, match=r"lists\.parquet: field 'text' .* must be a string, it is list<.*string>"):
        open_source(Dataset(source="parquet", path=str(tmp_path / "lists.parquet")))
    write_parquet(tmp_path / "b.parquet", [])
    with pytest.raises(UserError, match="holds no document"):
        open_source(Dataset(source="parquet", path=str(tmp_path / "b.parquet")))
    (tmp_path / "c.parquet").write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"c\.parquet: not a parquet file"):
        open_source(Dataset(source="parquet", path=str(tmp_path / "c.parquet")))


def test_damaged_parquet_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, [str(np.random.default_rng(i).bytes(99)) for i in range(20)])
    raw = path.read_bytes()
    path.write_bytes(raw[:100] + b"\xff" * 300 + raw[400:])
    with pytest.raises(UserError, match=r"a\.parquet, row group 0: damaged: .* Copy or download it again"):
        list(sequential(Dataset(source="parquet", path=str(path))).read(0, 0))
    path.write_bytes(raw[:-200] + b"\xff" * 190 + raw[-10:])
    with pytest.raises(UserError, match=r"a\.parquet: not a parquet file, or a damaged one"):
        open_source(Dataset(source="parquet", path=str(path)))
