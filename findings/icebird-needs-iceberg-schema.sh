#!/usr/bin/env bash
# Guess: a reader of Iceberg finds a column of a data file by its field id, so a renamed column shows its old values.
# Truth: icebird finds it by the footer key `iceberg.schema`, which pyiceberg does not write either. Without the key a renamed column is
#        undefined, and a new column that gets the old name shows the old column's values.
# Versions: icebird 0.3.1, pyiceberg 0.12.0, pyarrow 26.0.1. Seen 2026-11-27.
# It matters for every lake whose files Iceberg's Java library did not write. The key costs about 75 bytes a column in each file.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check "pyiceberg[sql-sqlite]==0.12.0" pyarrow==26.0.1
npm init -y > /dev/null
npm install --silent --no-audit --no-fund icebird@0.3.1 hyparquet-compressors
cat > make.py <<'PYTHON'
import os
import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, StringType

here = os.getcwd()
catalog = SqlCatalog("lake", uri=f"sqlite:///{here}/catalog.db", warehouse=f"file://{here}/warehouse")
catalog.create_namespace("shop")
table = catalog.create_table("shop.sales", Schema(NestedField(1, "id", LongType()), NestedField(2, "note", StringType())))
table.append(pa.table({"id": [1], "note": ["old"]}))
with table.update_schema() as change:
    change.rename_column("note", "title")
with table.update_schema() as change:
    change.add_column("note", StringType())
print("pyiceberg", table.scan().to_arrow().to_pylist())
PYTHON
cat > read.mjs <<'JAVASCRIPT'
import fs from 'node:fs'
globalThis.fetch = async (url, init = {}) => {
  let data = fs.readFileSync(String(url).replace('file://', ''))
  const range = new Headers(init.headers).get('range')?.match(/bytes=(\d+)-(\d*)/)
  if (init.method === 'HEAD') return new Response(null, { headers: { 'content-length': `${data.length}` } })
  if (range) return new Response(data.subarray(+range[1], range[2] ? +range[2] + 1 : undefined), { status: 206 })
  return new Response(data)
}
const { icebergRead } = await import('icebird')
const folder = 'warehouse/shop/sales/metadata'
const newest = fs.readdirSync(folder).filter(name => name.endsWith('.json')).sort().at(-1)
const rows = await icebergRead({ tableUrl: 'file:', metadata: JSON.parse(fs.readFileSync(`${folder}/${newest}`)) })
console.log('icebird', rows.map(row => `title=${row.title} note=${row.note}`).join())
JAVASCRIPT
venv/bin/python make.py | tee seen
node read.mjs | tee --append seen
grep --quiet "pyiceberg .*'title': 'old', 'note': None" seen
grep --quiet "icebird title=undefined note=old" seen
