"""Files of rows: listing, opening, and reading in bounded memory. Begin with `source` and `row_files`."""
