"""`bapo tokens create|rotate|retire`: API tokens for services reachable from other machines."""

from __future__ import annotations

from typing import Annotated

import typer

from bapo.cli.help import Command, group
from bapo.runtime.auth.api_tokens import Role
from bapo.runtime.auth.redis_password import RedisSecrets
from bapo.runtime.auth.token_store import ACTIVE, TokenSet

app = group("Create, rotate and retire API tokens for services reachable from other machines.")

Folder = Annotated[str, typer.Argument(metavar="FOLDER", help="Folder of the tokens, such as RUN/tokens.")]
Who = Annotated[Role, typer.Argument(metavar="ROLE", help="worker, learner, scheduler, evaluator, viewer, operator.")]


@app.command(cls=Command)
def create(
    folder: Folder,
    redis: Annotated[bool, typer.Option("--redis", help="Also create a password and an ACL file for Redis.")] = False,
) -> None:
    """Create a token for every role; existing tokens are kept. bapo train does this automatically.

    Examples:

      bapo tokens create secrets
    """
    tokens = TokenSet(folder)
    tokens.create()
    typer.echo(f"services accept the tokens in {tokens.accepted_path}; tokens by role:")
    for role in Role:
        typer.echo(f"  {role.value:<10} {tokens.path_of(role)}")
    if redis:
        made = RedisSecrets(tokens.folder)
        made.create()
        typer.echo(f"Redis: password in {made.password_path}, users for --aclfile in {made.users_path}")


@app.command(cls=Command)
def rotate(folder: Folder, role: Who) -> None:
    """Create a new token for a role; the previous one stays valid until bapo tokens retire.

    Examples:

      bapo tokens rotate outputs/demo-001/tokens worker
    """
    TokenSet(folder).rotate(role)
    typer.echo(f"{role.value} has a new token; {ACTIVE} are valid until: bapo tokens retire {folder} {role.value}")


@app.command(cls=Command)
def retire(folder: Folder, role: Who) -> None:
    """Accept only the latest token of a role; services reload it within a second.

    Examples:

      bapo tokens retire outputs/demo-001/tokens worker
    """
    TokenSet(folder).retire(role)
    typer.echo(f"only the latest token of {role.value} is valid")
