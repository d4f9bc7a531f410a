// Program format_reader reads a table of lakeupsert. It was written from docs/FORMAT.md alone.
//
//	format_reader TABLE [SNAPSHOT]
//
// TABLE is the table's local folder, SNAPSHOT a number; without one the newest is read. Each row is a JSON object on a line of
// stdout, in no order. Dates are YYYY-MM-DD. Timestamps are YYYY-MM-DDTHH:MM:SS, in UTC if the column has a zone, and times of
// day HH:MM:SS; both with the digits of their unit behind a point. Durations have their unit behind the number. Decimals are
// text with all digits of their scale, binary is base64, a map is a list of {"key", "value"}. Floats that JSON lacks are "NaN",
// "+Inf" and "-Inf". If the reader refuses something, it prints no row but the reason on stderr, and ends with status 1.
package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/RoaringBitmap/roaring/v2/roaring64"
	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/compute"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"github.com/apache/arrow-go/v18/parquet/file"
	"github.com/apache/arrow-go/v18/parquet/pqarrow"
)

const (
	greatestFormat = 2
	vectorMagic    = 1681511377
	blockBytes     = 16384
)

var (
	versionName  = regexp.MustCompile(`^v[0-9]{20}\.json$`)
	digestField  = regexp.MustCompile(`,"digest":"([0-9a-f]{64})"}$`)
	footerDigits = regexp.MustCompile(`(?s)lakeupsert\.crc..([0-9a-f]{8})`)
	fractions    = map[arrow.TimeUnit]string{arrow.Millisecond: ".000", arrow.Microsecond: ".000000", arrow.Nanosecond: ".000000000"}
)

type ledgerEntry struct{ Snapshot *int }

type snapshot struct {
	SpecVersion int `json:"spec_version"`
	Partitions  map[string]struct {
		Version, Merged int
		Group           *struct{ Name string }
	}
	Tags        map[string]int
	Expired     int
}

type spec struct {
	PartitionBy []string `json:"partition_by"`
	Requires    []string
	ArrowSchema []byte `json:"arrow_schema"`
	Renames     []struct {
		ID          int
		Name        string
		LastFieldID int `json:"last_field_id"`
		Retyped     any
	}
	OneNameSince *int `json:"one_name_since"`
	FileNames    []struct {
		ID   int
		Name string
	} `json:"file_names"`
}

type manifest struct {
	Merged  int
	Buckets []struct{ Base, Deltas []dataFile }
}

type dataFile struct {
	Name          string
	Rows, Renames int
	Deleted       *struct {
		Rows, Size, At int
		Inline         []byte
		Name           string
		CRC            *uint32
	}
}

// A table is open at one snapshot.
type table struct {
	root    string
	shown   snapshot
	spec    spec
	columns []arrow.Field
}

type row = map[string]any

// require ends the program with what was found wrong, unless it is right.
func require(right bool, format string, values ...any) {
	if !right {
		panic(fmt.Errorf(format, values...))
	}
}

func must[T any](value T, err error) T {
	require(err == nil, "%w", err)
	return value
}

// complement subtracts 20 digits from 10^20 - 1.
func complement(digits string) string {
	return strings.Map(func(digit rune) rune { return '9' - digit + '0' }, digits)
}

// head returns the number of a chain's newest version, or -1 if it has none.
func (t *table) head(chain string) int {
	entries, err := os.ReadDir(filepath.Join(t.root, "_lakeupsert", chain)) // in the order of names
	require(err == nil || os.IsNotExist(err), "%w", err)
	at := slices.IndexFunc(entries, func(entry os.DirEntry) bool { return versionName.MatchString(entry.Name()) })
	if at < 0 {
		return -1
	}
	return must(strconv.Atoi(complement(entries[at].Name()[1:21])))
}

// checked returns the bytes of an object of metadata.
func checked(path string) []byte {
	data := must(os.ReadFile(path))
	at := digestField.FindSubmatchIndex(data)
	require(at != nil, "%s is damaged: it does not end with its digest", path)
	sum := sha256.Sum256(data[:at[0]])
	require(hex.EncodeToString(sum[:]) == string(data[at[2]:at[3]]), "%s is damaged: its digest differs", path)
	return data
}

// read fills body from a version of a chain.
func (t *table) read(chain, kind string, number int, body any) {
	path := filepath.Join(t.root, "_lakeupsert", chain, "v"+complement(fmt.Sprintf("%020d", number))+".json")
	data := checked(path)
	var link struct {
		Format, Number int
		Kind           string
		Body           json.RawMessage
	}
	must(0, json.Unmarshal(data, &link))
	require(link.Format <= greatestFormat, "%s has format %d, which this reader does not know", path, link.Format)
	require(link.Kind == kind && link.Number == number, "%s is %s %d, not %s %d", path, link.Kind, link.Number, kind, number)
	must(0, json.Unmarshal(link.Body, body))
}

// open reads the wanted snapshot and its spec; the newest for a number below 0.
func open(root string, wanted int) *table {
	t := &table{root: root}
	batch := t.head("ledger") // before the snapshots: one exists before an entry names it
	require(batch >= 0, "there is no table at %s", root)
	var entry ledgerEntry
	t.read("ledger", "ledger", batch, &entry)
	newest := t.head("snapshots")
	require(entry.Snapshot == nil || *entry.Snapshot <= newest, "ledger entry %d names a snapshot that is gone", batch)
	require(wanted <= newest, "there is no snapshot %d", wanted)
	if newest < 0 {
		return t // nothing is published
	}
	t.read("snapshots", "snapshot", newest, &t.shown)
	if wanted >= 0 {
		kept := wanted >= t.shown.Expired || slices.Contains(slices.Collect(maps.Values(t.shown.Tags)), wanted)
		require(kept, "snapshot %d has expired", wanted)
		t.shown = snapshot{}
		t.read("snapshots", "snapshot", wanted, &t.shown)
	}
	t.read("spec", "spec", t.shown.SpecVersion, &t.spec)
	for _, feature := range t.spec.Requires {
		require(feature == "groups", "the table requires %q, which this reader does not know", feature)
	}
	for _, rename := range t.spec.Renames {
		require(rename.Retyped == nil, "the column %q was retyped, and this reader converts no values", rename.Name)
	}
	t.columns = must(ipc.NewReader(bytes.NewReader(t.spec.ArrowSchema))).Schema().Fields()
	return t
}

// nameIn returns what the column is called in files whose spec had so many renames; empty if they lack it.
func (t *table) nameIn(column arrow.Field, renames int) string {
	text, _ := column.Metadata.GetValue("PARQUET:field_id")
	id := must(strconv.Atoi(text))
	require(renames <= len(t.spec.Renames), "a file has the names after %d renames, the spec has %d", renames, len(t.spec.Renames))
	if since := t.spec.OneNameSince; since != nil && renames >= *since {
		for _, named := range t.spec.FileNames {
			if named.ID == id {
				return named.Name
			}
		}
		return column.Name
	}
	for place, later := range t.spec.Renames[renames:] {
		if place == 0 && id > later.LastFieldID {
			return ""
		}
		if later.ID == id {
			return later.Name
		}
	}
	return column.Name
}

// deleted returns the positions of a file's superseded rows.
func (t *table) deleted(of dataFile) *roaring64.Bitmap {
	positions, vector := roaring64.New(), of.Deleted
	if vector == nil {
		return positions
	}
	data := vector.Inline
	if vector.Name != "" {
		object := must(os.ReadFile(filepath.Join(t.root, vector.Name)))
		require(vector.At+vector.Size <= len(object), "%s is cut", vector.Name)
		data = object[vector.At : vector.At+vector.Size]
		right := vector.CRC == nil || *vector.CRC == crc32.ChecksumIEEE(data)
		require(right, "%s is damaged: the CRC of the vector at %d differs", vector.Name, vector.At)
	}
	known := len(data) > 4 && binary.LittleEndian.Uint32(data) == vectorMagic
	require(known, "the vector of %s does not begin with %d", of.Name, vectorMagic)
	must(positions.ReadFrom(bytes.NewReader(data[4:])))
	count := positions.GetCardinality()
	require(count == uint64(vector.Rows), "the vector of %s has %d rows, not %d", of.Name, count, vector.Rows)
	return positions
}

// verify compares a data file with the checksums in its footer, if it has any.
func verify(data []byte, parquet *file.Reader, name string) {
	keys := parquet.MetaData().KeyValueMetadata()
	own, blocks, crc := keys.FindValue("lakeupsert.file"), keys.FindValue("lakeupsert.blocks"), keys.FindValue("lakeupsert.crc")
	if own == nil || *own != name || blocks == nil && crc == nil {
		return
	}
	require(blocks != nil && crc != nil, "%s is damaged: it has one of two checksums", name)
	length, encoded, _ := strings.Cut(*blocks, " ")
	size, sums := must(strconv.Atoi(length)), must(base64.StdEncoding.DecodeString(encoded))
	require(size <= len(data) && len(sums) == (size+blockBytes-1)/blockBytes*4, "%s is damaged: its blocks are not counted right", name)
	for at := 0; at < size; at += blockBytes {
		found := crc32.ChecksumIEEE(data[at:min(at+blockBytes, size)])
		require(found == binary.LittleEndian.Uint32(sums[at/blockBytes*4:]), "%s is damaged behind byte %d", name, at)
	}
	end := len(data) - 8
	footer := slices.Clone(data[end-int(binary.LittleEndian.Uint32(data[end:])) : end])
	if at := footerDigits.FindSubmatchIndex(footer); at != nil {
		copy(footer[at[2]:at[3]], "00000000")
	}
	require(fmt.Sprintf("%08x", crc32.ChecksumIEEE(footer)) == *crc, "%s is damaged: the CRC of its footer differs", name)
}

// values converts an array to the type and returns what JSON has for each row. A nil array is null in each.
func values(from arrow.Array, to arrow.DataType, rows int) []any {
	found := make([]any, rows)
	if from == nil {
		return found
	}
	if extended, ok := from.(array.ExtensionArray); ok {
		from = extended.Storage()
	}
	switch want := to.(type) {
	case arrow.ExtensionType:
		return values(from, want.StorageType(), rows)
	case *arrow.StructType:
		stored := from.DataType().(*arrow.StructType)
		for _, field := range want.Fields() {
			var part arrow.Array
			if at, ok := stored.FieldIdx(field.Name); ok {
				part = from.(*array.Struct).Field(at)
			}
			for at, value := range values(part, field.Type, rows) {
				if found[at] == nil {
					found[at] = row{}
				}
				found[at].(row)[field.Name] = value
			}
		}
	case arrow.ListLikeType:
		list := from.(array.ListLike)
		items := values(list.ListValues(), want.Elem(), list.ListValues().Len())
		for at := range found {
			start, end := list.ValueOffsets(at)
			found[at] = items[start:end]
		}
	default:
		switch to.ID() {
		case arrow.FLOAT16, arrow.FLOAT32:
			to = arrow.PrimitiveTypes.Float64 // so that JSON has all digits of a float
		case arrow.DECIMAL32, arrow.DECIMAL64: // arrow-go can't convert to them
			to = &arrow.Decimal128Type{Precision: want.(arrow.DecimalType).GetPrecision(), Scale: want.(arrow.DecimalType).GetScale()}
		}
		if !arrow.TypeEqual(from.DataType(), to) {
			from = must(compute.CastArray(context.Background(), from, compute.SafeCastOptions(to)))
		}
		for at := range found {
			found[at] = plain(from, at)
		}
	}
	for at := range found {
		if from.IsNull(at) {
			found[at] = nil
		}
	}
	return found
}

// plain returns what JSON has for a value that is not nested.
func plain(from arrow.Array, at int) any {
	switch column := from.(type) {
	case *array.Decimal128:
		return column.Value(at).ToString(column.DataType().(arrow.DecimalType).GetScale())
	case *array.Decimal256:
		return column.Value(at).ToString(column.DataType().(arrow.DecimalType).GetScale())
	case *array.Timestamp:
		unit := column.DataType().(*arrow.TimestampType).Unit
		return column.Value(at).ToTime(unit).Format("2006-01-02T15:04:05" + fractions[unit])
	case *array.Time32, *array.Time64:
		return column.ValueStr(at)
	}
	return from.GetOneForMarshal(at)
}

var (
	escape    = regexp.MustCompile("%[0-9A-Fa-f]{2}")
	shortDate = regexp.MustCompile(`^(\d{4})-(\d{1,2})-(\d{1,2})$`)
)

// decode returns the text of a part of a partition's name. A % that two hexadecimal digits do not follow is itself.
func decode(text string) string {
	return escape.ReplaceAllStringFunc(text, func(one string) string { return must(url.PathUnescape(one)) })
}

// fixed returns the values of the partition columns, which are in the partition's name.
func (t *table) fixed(folder string) row {
	if len(t.spec.PartitionBy) == 0 {
		require(folder == "whole-table", "%s is no partition of a table without partition columns", folder)
		return row{}
	}
	found, levels := row{}, strings.Split(folder, "/")
	require(len(levels) == len(t.spec.PartitionBy), "%s is no partition of %v", folder, t.spec.PartitionBy)
	for place, level := range levels {
		encoded, text, _ := strings.Cut(level, "=")
		name := decode(encoded)
		at := slices.IndexFunc(t.columns, func(column arrow.Field) bool { return column.Name == name })
		require(at >= 0 && name == t.spec.PartitionBy[place], "%s is no partition of %v", folder, t.spec.PartitionBy)
		text = decode(text)
		found[name] = text
		if of := t.columns[at].Type; of.ID() != arrow.STRING && of.ID() != arrow.LARGE_STRING {
			if day := shortDate.FindStringSubmatch(text); day != nil && of.ID() == arrow.DATE32 {
				text = day[1] + "-" + ("0" + day[2])[len(day[2])-1:] + "-" + ("0" + day[3])[len(day[3])-1:]
			}
			builder := array.NewBuilder(memory.DefaultAllocator, of)
			must(0, builder.AppendValueFromString(text))
			found[name] = values(builder.NewArray(), of, 1)[0]
		}
	}
	return found
}

// print writes the live rows of a data file, with the values of its partition.
func (t *table) print(out *json.Encoder, of dataFile, partition row) {
	deleted, data := t.deleted(of), must(os.ReadFile(filepath.Join(t.root, of.Name)))
	parquet := must(file.NewParquetReader(bytes.NewReader(data)))
	verify(data, parquet, of.Name)
	require(parquet.NumRows() == int64(of.Rows), "%s has %d rows, not %d", of.Name, parquet.NumRows(), of.Rows)
	parquet.MetaData().FileMetaData.KeyValueMetadata = nil // the spec has the types, and arrow-go can't read all that a footer names
	reader := must(pqarrow.NewFileReader(parquet, pqarrow.ArrowReadProperties{}, memory.DefaultAllocator))
	batches := array.NewTableReader(must(reader.ReadTable(context.Background())), 0)
	for position := uint64(0); batches.Next(); {
		batch := batches.RecordBatch()
		rows := make([]row, batch.NumRows())
		for at := range rows {
			rows[at] = row{}
		}
		for _, column := range t.columns {
			var from arrow.Array
			if found := batch.Schema().FieldIndices(t.nameIn(column, of.Renames)); len(found) > 0 {
				from = batch.Column(found[0])
			}
			for at, value := range values(from, column.Type, len(rows)) {
				rows[at][column.Name] = value
			}
		}
		for _, one := range rows {
			maps.Copy(one, partition)
			if !deleted.Contains(position) {
				must(0, out.Encode(one))
			}
			position++
		}
	}
}

// group returns a partition's manifest in an object that has those of several.
func (t *table) group(name, folder string) manifest {
	path := filepath.Join(t.root, name)
	var found struct {
		Format    int
		Manifests map[string]manifest
	}
	must(0, json.Unmarshal(checked(path), &found))
	require(found.Format <= greatestFormat, "%s has format %d, which this reader does not know", path, found.Format)
	own, exists := found.Manifests[folder]
	require(exists, "%s lacks the manifest of %s", path, folder)
	return own
}

func main() {
	defer func() {
		if reason := recover(); reason != nil {
			fmt.Fprintln(os.Stderr, reason)
			os.Exit(1)
		}
	}()
	require(len(os.Args) == 2 || len(os.Args) == 3, "usage: format_reader TABLE [SNAPSHOT]")
	wanted := -1
	if len(os.Args) == 3 {
		wanted = must(strconv.Atoi(os.Args[2]))
	}
	var printed bytes.Buffer
	t, out := open(os.Args[1], wanted), json.NewEncoder(&printed)
	for folder, entry := range t.shown.Partitions {
		var version manifest
		if entry.Group != nil {
			version = t.group(entry.Group.Name, folder)
		} else {
			t.read("partitions/"+folder, "manifest", entry.Version, &version)
		}
		require(version.Merged == entry.Merged, "manifest %d of %s is not the one that the snapshot shows", entry.Version, folder)
		for _, bucket := range version.Buckets {
			for _, of := range append(bucket.Base, bucket.Deltas...) {
				t.print(out, of, t.fixed(folder))
			}
		}
	}
	must(printed.WriteTo(os.Stdout))
}
