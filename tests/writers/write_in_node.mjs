// Write the table of values.py by the npm packages of `make writers`: node write_in_node.mjs TABLE.json FOLDER
// `NAME.told` has the columns of file NAME as the writer's own reader tells them, or as they were given to it if it has none.

import { once } from "node:events";
import { createRequire } from "node:module";
import fs from "node:fs";

import * as arrow from "apache-arrow";
import { stringify } from "csv-stringify/sync";
import { parquetReadObjects } from "hyparquet";
import { parquetWriteBuffer } from "hyparquet-writer";
import Papa from "papaparse";

const require = createRequire(import.meta.url);
const wasm = require("parquet-wasm"); // its module for Node is of CommonJS
const [table, out] = process.argv.slice(2);
const VALUES = JSON.parse(fs.readFileSync(table));
const ROWS = VALUES.id.length;
const DAY = 86_400_000;

const units = { ms: 1_000_000n, us: 1000n, ns: 1n };
const unitOf = (name) => units[name.split("_")[1]];
const isInt = (name) => name === "id" || /^u?int/.test(name);
const isBig = (name) => name === "id" || name.endsWith("int64");
const isDecimal = (name) => name.startsWith("decimal");
const isMoment = (name) => /^(ts|time)_/.test(name);

/** A value as programs in JavaScript have it: Date for days and milliseconds, otherwise bigint. */
function native(name, text) {
  if (text === null) return null;
  if (isInt(name)) return isBig(name) ? BigInt(text) : Number(text);
  if (name.startsWith("float")) return Number(text);
  if (isDecimal(name)) return BigInt(text.replace(".", ""));
  if (name === "binary") return Buffer.from(text, "hex");
  if (name === "date") return new Date(Number(text) * DAY);
  if (name.startsWith("ts_ms")) return new Date(Number(BigInt(text) / 1_000_000n));
  if (isMoment(name)) return BigInt(text) / unitOf(name);
  if (name === "json") return JSON.parse(text);
  return text;
}

/** What `native` made, as a reader gives it. */
function told(name, value) {
  if (value === null || value === undefined) return null;
  if (value instanceof Date && name === "date") return String(value.getTime() / DAY);
  if (value instanceof Date) return String(BigInt(value.getTime()) * 1_000_000n);
  if (name.startsWith("float")) return Number.isNaN(value) ? "NaN" : number(value);
  if (isMoment(name)) return String(BigInt(value) * unitOf(name));
  if (isDecimal(name)) return typeof value === "bigint" ? point(value, scaleOf(name)) : Number(value).toFixed(scaleOf(name));
  if (name === "binary") return Buffer.from(value).toString("hex");
  if (name === "json") return JSON.stringify(value);
  return typeof value === "bigint" || isInt(name) || name === "date" ? String(value) : value;
}

const scaleOf = (name) => Number(name.split("_")[2]);
const precisionOf = (name) => Number(name.split("_")[1]);

function point(unscaled, scale) {
  const digits = String(unscaled < 0n ? -unscaled : unscaled).padStart(scale + 1, "0");
  return (unscaled < 0n ? "-" : "") + digits.slice(0, -scale) + "." + digits.slice(-scale);
}

function number(value) {
  if (!Number.isFinite(value)) return String(value);
  if (Object.is(value, -0)) return "-0.0";
  const text = String(value).replace(/e([+-])(\d)$/, "e$10$2");
  return /[.e]/.test(text) ? text : `${text}.0`;
}

function keep(file, names, rows) {
  const columns = names.map((name) => [name, rows.map((row) => told(name, row[name]))]);
  fs.writeFileSync(`${out}/${file}.told`, JSON.stringify(Object.fromEntries(columns)));
}

function keepAsGiven(file, names) {
  fs.writeFileSync(`${out}/${file}.told`, JSON.stringify(Object.fromEntries(names.map((name) => [name, VALUES[name]]))));
}

const rowsOf = (names, value = native) =>
  Array.from({ length: ROWS }, (_, i) => Object.fromEntries(names.map((name) => [name, value(name, VALUES[name][i])])));

async function hyparquetWriter() {
  const of = (name) => {
    const bits = name.match(/\d+$/)?.[0];
    if (name === "id") return { type: "INT64" };
    if (isInt(name)) return { type: bits === "64" ? "INT64" : "INT32", converted_type: name.toUpperCase().replace("INT", "INT_") };
    if (isDecimal(name)) {
      const width = precisionOf(name) > 18 ? { type: "FIXED_LEN_BYTE_ARRAY", type_length: 16 } : { type: "INT64" };
      return { ...width, converted_type: "DECIMAL", precision: precisionOf(name), scale: scaleOf(name) };
    }
    const unit = { ms: "MILLIS", us: "MICROS", ns: "NANOS" }[name.split("_")[1]];
    if (name.startsWith("ts_")) {
      return { type: "INT64", logical_type: { type: "TIMESTAMP", isAdjustedToUTC: name.endsWith("utc"), unit } };
    }
    if (name.startsWith("time_")) {
      return { type: unit === "MILLIS" ? "INT32" : "INT64", logical_type: { type: "TIME", isAdjustedToUTC: false, unit } };
    }
    return {
      bool: { type: "BOOLEAN" },
      float32: { type: "FLOAT" },
      float64: { type: "DOUBLE" },
      text: { type: "BYTE_ARRAY", converted_type: "UTF8" },
      binary: { type: "BYTE_ARRAY" },
      date: { type: "INT32", converted_type: "DATE" },
      uuid: { type: "FIXED_LEN_BYTE_ARRAY", type_length: 16, logical_type: { type: "UUID" } },
      json: { type: "BYTE_ARRAY", converted_type: "JSON" },
      enum: { type: "BYTE_ARRAY", logical_type: { type: "ENUM" } },
    }[name];
  };
  const names = Object.keys(VALUES).filter((name) => of(name) && !["uint64"].includes(name));
  const given = (name, text) => {
    const value = native(name, text);
    return name === "time_ms" && value !== null ? Number(value) : value;
  };
  const columnData = names.map((name) => ({ name, data: VALUES[name].map((text) => given(name, text)) }));
  columnData.find(({ name }) => name === "enum").data = VALUES.enum.map((text) => text && Buffer.from(text));
  const schema = [{ name: "root", num_children: names.length }, ...names.map((name) => ({ name, repetition_type: "OPTIONAL", ...of(name) }))];
  const buffer = parquetWriteBuffer({ columnData, schema });
  fs.writeFileSync(`${out}/hyparquet-writer.parquet`, Buffer.from(buffer));
  keep("hyparquet-writer.parquet", names, rowsOf(names));
}

/** Three packages of one interface. */
async function parquetjs(file, { ParquetSchema, ParquetWriter, ParquetReader }, more) {
  const types = {
    id: "INT64", bool: "BOOLEAN", int8: "INT_8", int16: "INT_16", int32: "INT32", uint8: "UINT_8", uint16: "UINT_16",
    float32: "FLOAT", float64: "DOUBLE", text: "UTF8", binary: "BYTE_ARRAY", date: "DATE", time_ms: "TIME_MILLIS",
    time_us: "TIME_MICROS", ts_ms_utc: "TIMESTAMP_MILLIS", json: "JSON",
  };
  const fields = Object.entries(types).map(([name, type]) => [name, { type, optional: name !== "id" }]);
  const schema = new ParquetSchema({ ...Object.fromEntries(fields), ...more });
  const names = Object.keys(schema.schema);
  const writer = await ParquetWriter.openFile(schema, `${out}/${file}`);
  const given = (name, text) => {
    const value = native(name, text);
    if (value === null || (Number.isNaN(value) && !more.decimal_9_2)) return undefined; // the old ones refuse NaN
    if (isDecimal(name)) return Number(text);
    if (name === "ts_us_utc") return new Date(Math.floor(Number(value) / 1000));
    return name.startsWith("time_") ? Number(value) : value;
  };
  for (const row of rowsOf(names, given)) await writer.appendRow(row);
  await writer.close();
  const reader = await ParquetReader.openFile(`${out}/${file}`);
  const cursor = reader.getCursor();
  const rows = [];
  for (let row = await cursor.next(); row; row = await cursor.next()) rows.push(row);
  await reader.close();
  // Its own reader gives negative decimals in the wrong rows: what it stores, by its source.
  if (more.decimal_9_2) rows.forEach((row, i) => (row.decimal_9_2 = cents(VALUES.decimal_9_2[i])));
  keep(file, names, rows);
}

const cents = (text) => text && BigInt(Math.trunc(Number(text) * 100));

async function parquetWasm() {
  const types = {
    id: new arrow.Int64(), bool: new arrow.Bool(), int8: new arrow.Int8(), int16: new arrow.Int16(), int32: new arrow.Int32(),
    int64: new arrow.Int64(), uint8: new arrow.Uint8(), uint16: new arrow.Uint16(), uint32: new arrow.Uint32(), uint64: new arrow.Uint64(),
    float32: new arrow.Float32(), float64: new arrow.Float64(), text: new arrow.Utf8(), binary: new arrow.Binary(), date: new arrow.DateDay(),
    time_ms: new arrow.TimeMillisecond(), time_us: new arrow.TimeMicrosecond(), time_ns: new arrow.TimeNanosecond(),
    ts_ms: new arrow.TimestampMillisecond(), ts_ms_utc: new arrow.TimestampMillisecond("UTC"),
    enum: new arrow.Dictionary(new arrow.Utf8(), new arrow.Int32()),
    list: new arrow.List(new arrow.Field("item", new arrow.Int64(), true)),
    struct: new arrow.Struct([new arrow.Field("a", new arrow.Int64(), true), new arrow.Field("b", new arrow.Utf8(), true)]),
  };
  const nested = {
    list: (list) => list && list.map((one) => one && BigInt(one)),
    struct: (row) => row && { ...row, a: row.a && BigInt(row.a) },
    time_ms: (text) => text && Number(BigInt(text) / 1_000_000n),
  };
  const names = Object.keys(types);
  const given = (name, value) => (nested[name] ?? ((text) => native(name, text)))(value);
  const vectors = names.map((name) => [name, arrow.vectorFromArray(VALUES[name].map((value) => given(name, value)), types[name])]);
  const written = wasm.Table.fromIPCStream(arrow.tableToIPC(new arrow.Table(Object.fromEntries(vectors)), "stream"));
  fs.writeFileSync(`${out}/parquet-wasm.parquet`, wasm.writeParquet(written));
  keepAsGiven("parquet-wasm.parquet", names);
}

/** Two packages of one interface. They know no logical types: values are given as they are stored, long ones as numbers. */
async function avro(file, { createFileEncoder }, wrapsUnions) {
  const logical = (type, logicalType, more) => ({ type, logicalType, ...more });
  const decimal = (name) => logical("bytes", "decimal", { precision: precisionOf(name), scale: scaleOf(name) });
  const types = {
    id: "long", bool: "boolean", int32: "int", float32: "float", float64: "double", text: "string", binary: "bytes",
    decimal_9_2: decimal("decimal_9_2"), decimal_18_4: decimal("decimal_18_4"), decimal_38_10: decimal("decimal_38_10"),
    date: logical("int", "date"), time_ms: logical("int", "time-millis"), time_us: logical("long", "time-micros"),
    ts_ms: logical("long", "local-timestamp-millis"), ts_ms_utc: logical("long", "timestamp-millis"),
    uuid: logical("string", "uuid"), enum: { type: "enum", name: "e", symbols: ["a", "b"] },
    map: { type: "map", values: ["null", "long"] },
  };
  const names = Object.keys(types);
  const wrap = (type, value) => (value === null || !wrapsUnions ? value : { [type.name ?? type.type ?? type]: value });
  const stored = (name, value) => {
    if (value === null) return null;
    if (isDecimal(name)) return bytes(BigInt(value.replace(".", "")));
    if (name === "date" || name === "id") return Number(value);
    if (isMoment(name)) return Number(BigInt(value) / unitOf(name));
    const entries = () => Object.entries(value).map(([key, one]) => [key, wrap("long", one && Number(one))]);
    return name === "map" ? Object.fromEntries(entries()) : native(name, value);
  };
  const fields = names.map((name) => ({ name, type: name === "id" ? "long" : ["null", types[name]] }));
  const encoder = createFileEncoder(`${out}/${file}`, { type: "record", name: "row", fields });
  const given = (name, value) => (name === "id" ? Number(value) : wrap(types[name], stored(name, value)));
  for (const row of rowsOf(names, given)) encoder.write(row);
  encoder.end();
  await once(encoder, "finish");
  keepAsGiven(file, names);
}

function bytes(n) {
  let width = 1;
  while (BigInt.asIntN(8 * width, n) !== n) width += 1;
  return Buffer.from(BigInt.asUintN(8 * width, n).toString(16).padStart(2 * width, "0"), "hex");
}

function text() {
  const iso = (name, value) => {
    if (value === null) return null;
    if (name === "date" || name === "ts_ms") return native(name, value).toISOString().slice(0, name === "date" ? 10 : 23);
    return value;
  };
  const names = ["id", "bool", "int64", "uint64", "decimal_38_10", "text", "date", "ts_ms", "uuid"];
  const rows = rowsOf(names, iso);
  fs.writeFileSync(`${out}/csv-stringify.csv`, stringify(rows, { header: true, cast: { boolean: String } }));
  fs.writeFileSync(`${out}/papaparse.csv`, Papa.unparse(rows));
  fs.writeFileSync(`${out}/json-stringify.jsonl`, rows.map((row) => JSON.stringify(row) + "\n").join(""));
  for (const file of ["csv-stringify.csv", "papaparse.csv", "json-stringify.jsonl"]) {
    keepAsGiven(file, names);
  }
}

const more = { int64: { type: "INT64", optional: true }, ts_us_utc: { type: "TIMESTAMP_MICROS", optional: true } };
const decimals = { ...more, decimal_9_2: { type: "DECIMAL", precision: 9, scale: 2, optional: true } };
for (const one of [
  hyparquetWriter,
  () => parquetjs("dsnp-parquetjs.parquet", require("@dsnp/parquetjs"), decimals),
  () => parquetjs("parquetjs.parquet", require("parquetjs"), {}),
  () => parquetjs("parquets.parquet", require("parquets"), {}),
  parquetWasm,
  () => avro("avsc.avro", require("avsc"), false),
  () => avro("avro-js.avro", require("avro-js"), true),
  text,
]) { try { await one(); } catch (e) { console.log("ERR", String(one).slice(0, 60), String(e?.stack ?? e).slice(0, 500)); } }
