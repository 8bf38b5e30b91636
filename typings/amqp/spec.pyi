class Connection:
    Close: tuple[int, int]
