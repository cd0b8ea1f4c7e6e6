def add_commands(c):
    pass


def main(a):
    return 0
