"""Input files of bulk jobs: listing, opening, and reading rows in bounded memory. Begin with `source`."""
