"""Scripts as people write them, each beside its port to Laststep: NAME_before.py and NAME.py."""
