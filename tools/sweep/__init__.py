"""The sweep: every architecture of the catalogue on a tiny random model, through the whole path, against one process."""
