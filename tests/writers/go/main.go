// Writes the table of values.py by Go's packages: writers TABLE.json TABLE.arrow FOLDER. The second file is the table in Arrow.
// `NAME.told` has the columns of file NAME, as they were given to the writer.
package main

import (
	"encoding/hex"
	"encoding/json"
	"log"
	"math/big"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

var (
	values map[string][]any
	out    string
)

func main() {
	text, err := os.ReadFile(os.Args[1])
	check(err)
	check(json.Unmarshal(text, &values))
	out = os.Args[3]
	byArrow(os.Args[2])
	for _, write := range []func(){byParquetGo, byXitongsys, byFraugster, byHamba, byGoavro, byTwmb, byCSV} {
		write()
	}
}

func check(err error) {
	if err != nil {
		log.Panic(err)
	}
}

func create(name string) *os.File {
	file, err := os.Create(filepath.Join(out, name))
	check(err)
	return file
}

func told(name string, columns []string) {
	found := map[string][]any{}
	for _, column := range columns {
		found[column] = values[column]
	}
	text, err := json.Marshal(found)
	check(err)
	check(os.WriteFile(filepath.Join(out, name+".told"), text, 0o644))
}

func integer(text string) *big.Int {
	n, ok := new(big.Int).SetString(strings.ReplaceAll(text, ".", ""), 10)
	if !ok {
		log.Panic(text)
	}
	return n
}

// Nanoseconds in the unit of a column, rounded down.
func moment(name, text string) int64 {
	unit := map[string]int64{"ms": 1_000_000, "us": 1000, "ns": 1}[strings.Split(name, "_")[1]]
	return new(big.Int).Div(integer(text), big.NewInt(unit)).Int64()
}

func asTime(text string) time.Time {
	seconds, nanos := new(big.Int).DivMod(integer(text), big.NewInt(1_000_000_000), new(big.Int))
	return time.Unix(seconds.Int64(), nanos.Int64()).UTC()
}

// A value as it is stored: a number, text or bytes.
func stored(name, text string) any {
	switch {
	case strings.HasPrefix(name, "ts_"), strings.HasPrefix(name, "time_"):
		return moment(name, text)
	case strings.HasPrefix(name, "float"):
		n, err := strconv.ParseFloat(text, 64)
		check(err)
		return n
	case strings.HasPrefix(name, "uint"):
		n, err := strconv.ParseUint(text, 10, 64)
		check(err)
		return n
	case strings.HasPrefix(name, "int"), name == "id", name == "date":
		n, err := strconv.ParseInt(text, 10, 64)
		check(err)
		return n
	case strings.HasPrefix(name, "decimal"):
		return integer(text)
	case name == "binary":
		bytes, err := hex.DecodeString(text)
		check(err)
		return bytes
	}
	return text
}

// The bytes of a decimal: two's complement, the first is the highest, as few as there can be, or a width.
func twos(n *big.Int, width int) []byte {
	if width == 0 {
		width = n.BitLen()/8 + 1
	}
	if n.Sign() < 0 {
		n = new(big.Int).Add(n, new(big.Int).Lsh(big.NewInt(1), uint(8*width)))
	}
	return n.FillBytes(make([]byte, width))
}
