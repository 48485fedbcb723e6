"""What integrations share: exchanging another library's code, calls and their counts, lists of embeddings."""
