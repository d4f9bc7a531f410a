"""How often something is repeated, and how long something waits: each figure of the package, and why it is this one.

The unit is in the name; `ATTEMPTS` and `TRIES` count the first one too. A pause doubles with each attempt and is jittered.
"""

# -- commits

CHAIN_ATTEMPTS = 20
"""After how many lost races a writer gives up. Each loser does its work again; 20 losses mean too many writers."""
LOST_PAUSE_SECONDS = 0.01
"""First pause after a lost race, doubled seven times: the winner needs a few requests until its version is there."""
SENDS = 6
"""How often to create an object with the same bytes without an answer. The same bytes are harmless; a read shows who won."""
SEND_PAUSE_SECONDS = 0.05
"""First pause after a create without an answer: the five between six sends take 1.6 s, in which a connection comes back."""
UNIT_ATTEMPTS = 3
"""How often the result of a unit is sent. Without it the unit is only merged again."""
LATEST_ATTEMPTS = 5
"""How often `latest` starts again at new heads if a vacuum deleted files that the old ones needed."""

# -- object stores

STORE_ATTEMPTS = 4
"""A request to S3 or Azure without an answer or with 5xx, except a create; a create after a 409. Most faults are over by then."""
REFUSED_ATTEMPTS = 12
"""A request that S3 refuses because it gets too many: on average 20 s of pauses. More: a server that only ever says 503 is
reported later. Fewer: a night over S3's limit fails where it would only be slower."""
PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 5.0
"""First and longest pause between attempts at S3: its refusals come for seconds."""
AZURE_PAUSE_SECONDS = 0.2
"""First pause between attempts at Azure, by its SDK and for deletes: with `STORE_ATTEMPTS`, about eight seconds at most."""
CONNECT_SECONDS = 5
"""For a connection to S3, SQS or Azure, which takes milliseconds."""
READ_SECONDS = 30
"""For the next bytes of an answer. A list of 5,000 objects may take seconds."""

# -- queues

SQS_ATTEMPTS = 5
"""A request to SQS, and messages that it rejects from a batch. A later command sends what was not sent."""
SQS_PAUSE_SECONDS = 0.5
"""First pause before rejected messages are sent again: SQS limits by the second."""
LEAST_WAIT_SECONDS = 1
"""How long a receive from SQS that finds nothing takes. 0 asks only some of its servers, and may miss messages."""
MOST_WAIT_SECONDS = 20
"""SQS's own limit for one receive. Answers may take `ANSWER_SECONDS` more."""
ANSWER_SECONDS = 10
LONGEST_SQS_LEASE_SECONDS = 43_200
LONGEST_AZURE_LEASE_SECONDS = 7 * 86_400
"""The services' own limits."""
LONGEST_SQLITE_LEASE_SECONDS = 300
"""No call hides a message for longer. One that is, was hidden by a clock that has been set back since, so it is visible."""
PEEK_SECONDS = 120
"""How long a caller that lists dead letters hides them from others. Too short for very many letters: some appear twice, which is
harmless. Longer: after a killed process, they stay hidden for that time."""
BUSY_SECONDS = 30.0
"""How long a call waits for another process's transaction in SQLite. Transactions take milliseconds, so a longer one hangs."""
BUSY_PAUSE_SECONDS = 0.05
"""Between looks whether another process still creates the file, which takes milliseconds."""
SQLITE_READS = 10
"""How often a call that only reads starts again because others opened or closed the file during the read."""

# -- workers

LEASE_SECONDS = 120.0
"""How long a worker owns a message between two extensions. It extends the lease every third of this while it works, so the
work itself may take any time. Longer: the message of a dead worker on another machine waits longer. Shorter than two failing
extensions: a second worker repeats the work (harmless, but paid twice)."""
RETRY_SECONDS = 5.0
"""How long a waiting worker hides a message whose partition failed: the cause needs time. One that drains the queue does not."""
IDLE_SECONDS = 1.0
"""Between two looks at an empty queue. Queue services charge for each request."""
WAIT_SECONDS = 5.0
"""How long a waiting worker lets the queue's server wait for a message. Longer: a worker takes longer to stop."""
AWAY_SECONDS = 300.0
"""How long Lambda hides messages if the store is away. Longer: a night waits longer after a short outage. Shorter: an outage may
use up all tries, and then only `reconcile` sends the messages again."""
LOOK_SECONDS = 0.2
"""How often a call that waits for threads checks the time that is left."""
PARENT_LOOK_SECONDS = 0.5
"""How often the parent of worker processes checks whether it should stop, if it hears nothing from them."""
TICK_SECONDS = 1.0
"""How often work that runs reports that it is alive, and checks whether it should stop."""
PROGRESS_SECONDS = 2.0
"""How often the queue is asked how many messages are left. Queue services charge for each request."""
LEADER_SECONDS = 30.0
"""After how many seconds without a sign of the leading `ingest` another one takes its place. A sign takes three requests, every
third of this. Longer: what a killed leader left waits longer. Shorter than a pause of the store: both work (harmless)."""
WHOLE_SECONDS = 60.0
"""How often `ingest` looks at the whole table, for what others appended, left unmerged or could not publish. Longer: such batches
wait longer. Shorter: more requests, and a partition that can never be merged is tried more often."""
LONGEST_FAILED_SECONDS = 3600.0
"""Longest pause before that look tries a partition again that can't be merged; the first is `WHOLE_SECONDS`. A batch that touches
it tries it immediately. Longer: a partition that somebody mended waits longer. Shorter: more dead letters."""
REMIND_SECONDS, KEPT_WARNINGS = 600.0, 100
"""How often `ingest` repeats a warning, and how many it knows. Longer: it is silent about a cause that has come again."""
LONGEST_AWAY_SECONDS = 60.0
"""Longest pause before `ingest` asks a store again that did not answer: it comes back within a minute of the store."""
UNREAD_SECONDS = 300.0
"""After how many seconds without a sign of `capture`, `status` warns of its source. Shorter: each restart is a warning."""
SOURCE_ENTRIES_SECONDS = 86_400.0
"""How much older than the newest entry of a source's chain another one is before it is deleted: far more than `FRESH_SECONDS`
of a chain, so that a stalled process can't take the number of a deleted one."""
SOURCE_TICK_SECONDS = 0.05
"""How often `capture` checks whether a landing file is due. Longer: rows of a quiet database land later."""
SOURCE_IDLE_SECONDS = 10.0
"""How often `capture` keeps the position of a database that changes other tables. Longer: the database keeps more of its log."""
SOURCE_LOOK_SECONDS = 10.0
"""How often `capture` asks Kafka for new partitions, and a database how much log it keeps. Longer: messages wait longer."""
SOURCE_ANSWER_SECONDS = 20.0
"""How long `capture` waits for an answer of Kafka or of a schema registry before it pauses and tries again."""
OTHERS_SECONDS = 10.0
"""How often a call that only waits for other workers looks at the partitions that are left: two requests for each."""
PUBLISH_SECONDS = 5.0
"""How much time a function must have left to publish. Longer: the last worker leaves more nights to `reconcile`, which runs
minutes later. Shorter: the function is killed while it publishes (harmless, but it raises an alarm)."""
GRACE_SECONDS = 25.0
"""By default, Kubernetes and ECS kill a container 30 s after SIGTERM. Messages must be returned before then."""

# -- the endpoint

HEAD_SECONDS = 10
"""How long a connection may have no request, or one whose head is not complete. Less: slow networks are cut off."""
BODY_SECONDS = 60.0
"""How long a body may take. It occupies one of the open requests for that time."""
READ_BODY_SECONDS = 10.0
"""Processor time to read a body, and a second more for each megabyte. Less: good rows are refused. More: a body that is never
read to its end keeps others waiting."""
CLIENT_ATTEMPTS, CLIENT_SECONDS = 8, 120
"""How often `Client.send` sends a batch, and how long it waits for an answer. A server may be away for 10 s: a restart."""

# -- Spark, catalogs, programs

SPARK_TRIES = 2
"""Spark starts a task again whose process died, and fails the job at the fourth time. So a task gives its items up before that.
More: a partition that needs too much memory takes longer to fail. Fewer: a lost machine fails its tasks."""
SPARK_LOST_RETRIES = 15
"""How often, once a second, a call to a Spark Connect server that does not answer is repeated. More: a night survives a longer
break of the network. Fewer: a command whose server is gone ends sooner."""
CATALOG_ATTEMPTS = 5
"""How often what a Hive or Glue catalog refuses, or another publisher overtakes, is compared and tried again."""
CATALOG_PAUSE_SECONDS = 0.2
"""First pause before that: the catalog changes the table for somebody else, for a moment."""
GLUE_ATTEMPTS = 5
"""A request to Glue, by its SDK: as for stores."""
CATALOG_CONNECT_SECONDS = 10
CATALOG_ANSWER_SECONDS = 60
"""How long a metastore, Glue or Iceberg's catalog may take for a batch of partitions or a commit before it is unreachable."""
HOOK_SECONDS = 30.0
"""How long a hook may take. More: a hook that hangs keeps a night open for longer. Fewer: slow services miss nights."""
PROGRAM_SECONDS = 60
"""How long Java or another Python may take to say its version: a cold machine takes seconds."""
