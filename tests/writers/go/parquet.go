package main

import (
	"encoding/csv"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math/big"
	"reflect"
	"strings"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	arrowcsv "github.com/apache/arrow-go/v18/arrow/csv"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/parquet"
	"github.com/apache/arrow-go/v18/parquet/pqarrow"
	"os"

	goparquet "github.com/fraugster/parquet-go"
	"github.com/fraugster/parquet-go/parquetschema"
	parquetgo "github.com/parquet-go/parquet-go"
	xitongsys "github.com/xitongsys/parquet-go/writer"
)

func byArrow(table string) {
	source, err := os.Open(table)
	check(err)
	reader, err := ipc.NewFileReader(source)
	check(err)
	rows, err := reader.RecordBatch(0)
	check(err)
	properties := pqarrow.NewArrowWriterProperties(pqarrow.WithStoreSchema())
	whole := array.NewTableFromRecords(rows.Schema(), []arrow.RecordBatch{rows})
	check(pqarrow.WriteTable(whole, create("arrow-go.parquet"), 1000, parquet.NewWriterProperties(), properties))
	names := make([]string, 0)
	for _, field := range rows.Schema().Fields() {
		names = append(names, field.Name)
	}
	told("arrow-go.parquet", names)
	plain := []string{"id", "bool", "int8", "int64", "uint64", "float64", "decimal_9_2", "text", "date", "uuid"}
	columns, fields := []arrow.Array{}, []arrow.Field{}
	for _, name := range plain {
		at := rows.Schema().FieldIndices(name)[0]
		columns, fields = append(columns, rows.Column(at)), append(fields, rows.Schema().Field(at))
	}
	schema := arrow.NewSchema(fields, nil)
	writer := arrowcsv.NewWriter(create("arrow-go.csv"), schema, arrowcsv.WithHeader(true), arrowcsv.WithNullWriter(""))
	check(writer.Write(array.NewRecordBatch(schema, columns, rows.NumRows())))
	check(writer.Flush())
	told("arrow-go.csv", plain)
}

type row struct {
	ID        int64           `parquet:"id"`
	Bool      *bool           `parquet:"bool"`
	Int8      *int8           `parquet:"int8"`
	Int16     *int16          `parquet:"int16"`
	Int32     *int32          `parquet:"int32"`
	Int64     *int64          `parquet:"int64"`
	Uint8     *uint8          `parquet:"uint8"`
	Uint16    *uint16         `parquet:"uint16"`
	Uint32    *uint32         `parquet:"uint32"`
	Uint64    *uint64         `parquet:"uint64"`
	Float32   *float32        `parquet:"float32,split"`
	Float64   *float64        `parquet:"float64"`
	Decimal9  *int32          `parquet:"decimal_9_2,decimal(2:9)"`
	Decimal18 *int64          `parquet:"decimal_18_4,decimal(4:18)"`
	Decimal38 *[16]byte       `parquet:"decimal_38_10,decimal(10:38)"`
	Text      *string         `parquet:"text,dict,zstd"`
	Binary    *[]byte         `parquet:"binary"`
	Date      *int32          `parquet:"date,date"`
	TsMs      *int64          `parquet:"ts_ms,timestamp(millisecond:local)"`
	TsUs      *int64          `parquet:"ts_us,timestamp(microsecond:local)"`
	TsNs      *int64          `parquet:"ts_ns,timestamp(nanosecond:local)"`
	TsMsUtc   *int64          `parquet:"ts_ms_utc,timestamp(millisecond)"`
	TsUsUtc   *int64          `parquet:"ts_us_utc,timestamp(microsecond)"`
	TsNsUtc   *int64          `parquet:"ts_ns_utc,timestamp(nanosecond)"`
	UUID      [16]byte        `parquet:"uuid,uuid,optional"`
	JSON      json.RawMessage `parquet:"json,json,optional"`
	Enum      string          `parquet:"enum,enum,optional"`
}

func byParquetGo() {
	rows := make([]row, len(values["id"]))
	names := []string{}
	kind := reflect.TypeFor[row]()
	for i := range kind.NumField() {
		name := strings.Split(kind.Field(i).Tag.Get("parquet"), ",")[0]
		names = append(names, name)
		for at, value := range values[name] {
			if value == nil {
				continue
			}
			field := reflect.ValueOf(&rows[at]).Elem().Field(i)
			if field.Kind() == reflect.Pointer {
				field.Set(reflect.New(field.Type().Elem()))
				field = field.Elem()
			}
			set(field, name, value)
		}
	}
	check(parquetgo.WriteFile(out+"/parquet-go.parquet", rows))
	told("parquet-go.parquet", names)
}

func set(field reflect.Value, name string, value any) {
	if given, is := value.(bool); is {
		field.SetBool(given)
		return
	}
	switch given := stored(name, value.(string)).(type) {
	case int64:
		field.SetInt(given)
	case uint64:
		field.SetUint(given)
	case float64:
		field.SetFloat(given)
	case []byte:
		field.SetBytes(given)
	case *big.Int:
		if field.Kind() == reflect.Array {
			reflect.Copy(field, reflect.ValueOf(twos(given, 16)))
		} else {
			field.SetInt(given.Int64())
		}
	case string:
		switch field.Kind() {
		case reflect.String:
			field.SetString(given)
		case reflect.Slice:
			field.SetBytes([]byte(given))
		default:
			reflect.Copy(field, reflect.ValueOf(uuidBytes(given)))
		}
	}
}

func uuidBytes(text string) []byte {
	bytes, err := hex.DecodeString(strings.ReplaceAll(text, "-", ""))
	check(err)
	return bytes
}

// Parquet's types of the two older packages.
var older = map[string][2]string{
	"id": {"INT64"}, "bool": {"BOOLEAN"}, "int8": {"INT32", "INT_8"}, "int16": {"INT32", "INT_16"}, "int32": {"INT32"},
	"int64": {"INT64"}, "float32": {"FLOAT"}, "float64": {"DOUBLE"}, "text": {"BYTE_ARRAY", "UTF8"}, "date": {"INT32", "DATE"},
	"time_ms": {"INT32", "TIME_MILLIS"}, "time_us": {"INT64", "TIME_MICROS"}, "ts_ms_utc": {"INT64", "TIMESTAMP_MILLIS"},
	"ts_us_utc": {"INT64", "TIMESTAMP_MICROS"}, "json": {"BYTE_ARRAY", "JSON"}, "enum": {"BYTE_ARRAY", "ENUM"},
}

func byXitongsys() {
	fields := []map[string]string{}
	names := []string{}
	for name, type_ := range older {
		if strings.HasPrefix(name, "float") || name == "enum" || name == "json" {
			continue // its rows are of JSON, without NaN and Infinity; it can't write ENUM
		}
		tag := fmt.Sprintf("name=%s, type=%s, repetitiontype=OPTIONAL", name, type_[0])
		if type_[1] != "" {
			tag += ", convertedtype=" + type_[1]
		}
		tag = strings.ReplaceAll(tag, "_utc", "") // it says that they have no zone
		names = append(names, strings.TrimSuffix(name, "_utc"))
		fields = append(fields, map[string]string{"Tag": tag})
	}
	schema, err := json.Marshal(map[string]any{"Tag": "name=root, repetitiontype=REQUIRED", "Fields": fields})
	check(err)
	file := create("xitongsys-parquet-go.parquet")
	writer, err := xitongsys.NewJSONWriterFromWriter(string(schema), file, 1)
	check(err)
	for i := range values["id"] {
		given := map[string]any{}
		for _, name := range names {
			if text, is := values[name][i].(string); is {
				given[name] = stored(name, text)
			} else if values[name][i] != nil {
				given[name] = values[name][i]
			}
		}
		text, err := json.Marshal(given)
		check(err)
		check(writer.Write(string(text)))
	}
	check(writer.WriteStop())
	check(file.Close())
	told("xitongsys-parquet-go.parquet", names)
}

func byFraugster() {
	schema := "message row {\n"
	names := []string{}
	for name, type_ := range older {
		annotation := ""
		if type_[1] != "" {
			annotation = " (" + type_[1] + ")"
		}
		schema += fmt.Sprintf("optional %s %s%s;\n", strings.ToLower(strings.ReplaceAll(type_[0], "BYTE_ARRAY", "binary")), name, annotation)
		names = append(names, name)
	}
	schema += "optional int64 ts_ns (TIMESTAMP(NANOS, false));\noptional fixed_len_byte_array(16) uuid (UUID);\noptional int64 decimal_18_4 (DECIMAL(18, 4));\n"
	names = append(names, "ts_ns", "uuid", "decimal_18_4")
	definition, err := parquetschema.ParseSchemaDefinition(schema + "}")
	check(err)
	file := create("fraugster-parquet-go.parquet")
	writer := goparquet.NewFileWriter(file, goparquet.WithSchemaDefinition(definition))
	for i := range values["id"] {
		given := map[string]any{}
		for _, name := range names {
			if value := values[name][i]; value != nil {
				given[name] = forFraugster(name, value)
			}
		}
		check(writer.AddData(given))
	}
	check(writer.Close())
	check(file.Close())
	told("fraugster-parquet-go.parquet", names)
}

func forFraugster(name string, value any) any {
	text, is := value.(string)
	if !is {
		return value
	}
	switch given := stored(name, text).(type) {
	case int64:
		if older[name][0] == "INT32" {
			return int32(given)
		}
		return given
	case float64:
		if name == "float32" {
			return float32(given)
		}
		return given
	case *big.Int:
		return given.Int64()
	case string:
		if name == "uuid" {
			return uuidBytes(given)
		}
		return []byte(given)
	default:
		return given
	}
}

func byCSV() {
	names := []string{"id", "bool", "int64", "uint64", "decimal_38_10", "text", "uuid"}
	writer := csv.NewWriter(create("encoding-csv.csv"))
	check(writer.Write(names))
	for i := range values["id"] {
		fields := []string{}
		for _, column := range names {
			if value := values[column][i]; value != nil {
				fields = append(fields, fmt.Sprint(value))
			} else {
				fields = append(fields, "")
			}
		}
		check(writer.Write(fields))
	}
	writer.Flush()
	check(writer.Error())
	told("encoding-csv.csv", names)
}
