"""The main job on real text: encode, retrieve, train, show. Run it with `python -m demo`."""
