package main

import (
	"encoding/json"
	"math/big"
	"os"
	"strings"
	"time"

	"github.com/hamba/avro/v2/ocf"
	"github.com/linkedin/goavro/v2"
	twmb "github.com/twmb/avro"
	twmbocf "github.com/twmb/avro/ocf"
)

type object = map[string]any

func logical(type_, name string) object { return object{"type": type_, "logicalType": name} }

func decimal(precision, scale int) object {
	return object{"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}
}

var avroTypes = map[string]any{
	"id": "long", "bool": "boolean", "int32": "int", "int64": "long", "float32": "float", "float64": "double", "text": "string",
	"binary": "bytes", "decimal_9_2": decimal(9, 2), "decimal_18_4": decimal(18, 4), "decimal_38_10": decimal(38, 10),
	"date": logical("int", "date"), "time_ms": logical("int", "time-millis"), "time_us": logical("long", "time-micros"),
	"ts_ms": logical("long", "local-timestamp-millis"), "ts_us": logical("long", "local-timestamp-micros"),
	"ts_ms_utc": logical("long", "timestamp-millis"), "ts_us_utc": logical("long", "timestamp-micros"),
	"uuid": logical("string", "uuid"), "enum": object{"type": "enum", "name": "e", "symbols": []string{"a", "b"}},
	"list": object{"type": "array", "items": []string{"null", "long"}},
}

func avroSchema(names []string) string {
	fields := []object{}
	for _, name := range names {
		type_ := any([]any{"null", avroTypes[name]})
		if name == "id" {
			type_ = "long"
		}
		fields = append(fields, object{"name": name, "type": type_})
	}
	text, err := json.Marshal(object{"type": "record", "name": "row", "fields": fields})
	check(err)
	return string(text)
}

func avroNames(without ...string) []string {
	names := []string{}
	for name := range avroTypes {
		if !strings.Contains(" "+strings.Join(without, " ")+" ", " "+name+" ") {
			names = append(names, name)
		}
	}
	return names
}

// A value as Go's programs have it: time.Time, time.Duration, big.Rat.
func native(name string, value any) any {
	text, is := value.(string)
	if list, isList := value.([]any); isList {
		numbers := []any{}
		for _, one := range list {
			if one != nil {
				one = stored("int64", one.(string))
			}
			numbers = append(numbers, one)
		}
		return numbers
	}
	if !is {
		return value
	}
	switch {
	case strings.HasPrefix(name, "ts_"):
		return asTime(text).Truncate(map[bool]time.Duration{true: time.Millisecond, false: time.Microsecond}[strings.HasPrefix(name, "ts_ms")])
	case strings.HasPrefix(name, "time_"):
		return time.Duration(integer(text).Int64())
	case name == "date":
		return time.Unix(stored(name, text).(int64)*86400, 0).UTC()
	case strings.HasPrefix(name, "decimal"):
		rat, _ := new(big.Rat).SetString(text)
		return rat
	case name == "float32":
		return float32(stored(name, text).(float64))
	case name == "int32":
		return int32(stored(name, text).(int64))
	}
	return stored(name, text)
}

func eachRow(names []string, value func(name string, value any) any, write func(object)) {
	for i := range values["id"] {
		given := object{}
		for _, name := range names {
			given[name] = nil
			if one := values[name][i]; one != nil {
				given[name] = value(name, native(name, one))
			}
		}
		write(given)
	}
}

// A value with the name of its type, as a union with null needs it.
func inUnion(name string, value any) any {
	if name == "id" {
		return value
	}
	if list, is := value.([]any); is {
		for i, one := range list {
			if one != nil {
				list[i] = object{"long": one}
			}
		}
	}
	type_ := avroTypes[name]
	if made, is := type_.(object); is {
		type_ = made["type"]
		if logicalType, is := made["logicalType"]; is {
			type_ = type_.(string) + "." + logicalType.(string)
		}
		if type_ == "enum" {
			type_ = "e"
		}
	}
	return object{type_.(string): value}
}

func asIs(_ string, value any) any { return value }

func byHamba() {
	names := avroNames("ts_ms", "ts_us")
	file := create("hamba.avro")
	writer, err := ocf.NewEncoder(avroSchema(names), file)
	check(err)
	eachRow(names, inUnion, func(given object) { check(writer.Encode(given)) })
	check(writer.Close())
	told("hamba.avro", names)
}

func byTwmb() {
	names := avroNames()
	file := create("twmb.avro")
	schema, err := twmb.Parse(avroSchema(names))
	check(err)
	writer, err := twmbocf.NewWriter(file, schema)
	check(err)
	eachRow(names, asIs, func(given object) { check(writer.Encode(given)) })
	check(writer.Close())
	check(file.Close())
	told("twmb.avro", names)
}

func byGoavro() {
	names := avroNames("uuid", "ts_ms", "ts_us")
	var file *os.File = create("goavro.avro")
	writer, err := goavro.NewOCFWriter(goavro.OCFConfig{W: file, Schema: avroSchema(names)})
	check(err)
	eachRow(names, inUnion, func(given object) { check(writer.Append([]any{given})) })
	check(file.Close())
	told("goavro.avro", names)
}
