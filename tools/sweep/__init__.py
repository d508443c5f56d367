"""The sweep: every architecture of the catalogue, as a tiny random model, through the whole path."""
