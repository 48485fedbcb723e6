"""The main job on real text: encode, search, train, show. Run it with `python -m demo`."""
