#!/usr/bin/env bash
# Guess: a stream of changes says that a table was truncated, or refuses to go on; both versions of wal2json's messages say the same.
# Truth: version 2 has a message T. Version 1 has a transaction whose list of changes is empty, the same as one that changed nothing.
# Versions: wal2json 2.5, PostgreSQL 15.18 (Debian's postgresql-15 and postgresql-15-wal2json). Seen 2026-11-28.
# It matters for a lake that is fed by version 1: all rows of the truncated table stay, and nothing can be counted or warned of.
set -euo pipefail
bin=/usr/lib/postgresql/15/bin
ls "$bin/initdb" "$bin/../lib/wal2json.so" > /dev/null # apt-get install postgresql-15 postgresql-15-wal2json
folder=$(mktemp -d)
as=()
if [ "$(id -u)" = 0 ]; then
    chown postgres "$folder"
    as=(runuser -u postgres --)
fi
trap '"${as[@]}" "$bin/pg_ctl" -D "$folder/data" -m immediate stop > /dev/null 2>&1; rm -rf "$folder"' EXIT
cd "$folder"
"${as[@]}" "$bin/initdb" -D data -A trust -U postgres --no-sync > /dev/null
"${as[@]}" "$bin/pg_ctl" -D data -w -l log -o "-k $folder -c listen_addresses= -c wal_level=logical" start > /dev/null
sql() { "$bin/psql" --host "$folder" --username postgres --tuples-only --no-align --command "$1"; }
sql "create table orders (id int primary key)" > /dev/null
for version in 1 2; do sql "select pg_create_logical_replication_slot('v$version', 'wal2json')" > /dev/null; done
sql "insert into orders values (1)" > /dev/null
sql "truncate orders" > /dev/null
messages() { sql "select data from pg_logical_slot_get_changes('v$1', null, null, 'format-version', '$1')"; }
sql "select version()"
dpkg-query --show postgresql-15-wal2json
echo "version 1:" && messages 1 | tee one
echo "version 2:" && messages 2 | tee two
grep -q '"action":"T"' two && ! grep -qi truncate one && [ "$(tail -1 one)" = '{"change":[]}' ]
