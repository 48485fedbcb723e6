"""The pages, tables and plots that are generated from the records."""
