"""`lakeupsert.toml`, parsed once into frozen types. Flag > environment > profile > file > default.

Unknown keys are refused with a suggestion, because a typo must not become a default. Credentials are never read here.
"""

from lakeupsert.config.addresses import canonical_address, is_remote, refuse_in_zones
from lakeupsert.config.load import ENVIRONMENT_PREFIX, FILE_NAME, Config, load, names_in, parse
from lakeupsert.config.messages import of_table, rename_aliases, toml_aliases, toml_key
from lakeupsert.config.publishers import PUBLISHERS, PublisherName
from lakeupsert.config.sources import DatabaseSource, KafkaSource, SourceSettings
from lakeupsert.config.types import (
    DATE_DIRECTIVES,
    POSITIONED,
    TIME_DIRECTIVES,
    DeleteSettings,
    DialectSettings,
    EnvelopeName,
    FormatVersion,
    GlueSettings,
    GroupSettings,
    HiveSettings,
    Hook,
    Hooks,
    IcebergSettings,
    LargeSettings,
    Reading,
    ReadSettings,
    TableSettings,
    VectorPlace,
    cores,
    size_of,
)

__all__ = ["canonical_address", "is_remote", "refuse_in_zones"]
__all__ += ["ENVIRONMENT_PREFIX", "FILE_NAME", "Config", "load", "names_in", "parse"]
__all__ += ["of_table", "rename_aliases", "toml_aliases", "toml_key"]
__all__ += ["DATE_DIRECTIVES", "POSITIONED", "TIME_DIRECTIVES", "DeleteSettings", "DialectSettings", "EnvelopeName"]
__all__ += ["FormatVersion", "GlueSettings", "GroupSettings", "HiveSettings", "Hook", "Hooks", "IcebergSettings"]
__all__ += ["LargeSettings", "PublisherName", "ReadSettings", "Reading", "TableSettings", "VectorPlace", "cores"]
__all__ += ["PUBLISHERS", "DatabaseSource", "KafkaSource", "SourceSettings", "size_of"]
