"""What `tools/export_catalogue.py` is made of: finding types, building small models, saying what they have."""
