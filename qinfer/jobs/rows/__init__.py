"""Input files of bulk jobs: listed, opened, and read as rows in bounded memory."""
