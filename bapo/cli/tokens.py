"""`bapo tokens create|rotate|retire`: sets of tokens for services that listen beyond one machine."""

from __future__ import annotations

from typing import Annotated

import typer

from bapo.runtime.auth.api_tokens import Role
from bapo.runtime.auth.redis_password import RedisSecrets
from bapo.runtime.auth.token_store import ACTIVE, TokenSet

app = typer.Typer(help="Make and replace the tokens that services show each other.", no_args_is_help=True)

Folder = Annotated[str, typer.Argument(metavar="FOLDER", help="Where the set is, for example RUN/tokens.")]
Who = Annotated[Role, typer.Argument(metavar="ROLE", help="worker, learner, scheduler, evaluator, viewer, operator.")]


@app.command()
def create(
    folder: Folder,
    redis: Annotated[bool, typer.Option("--redis", help="Also a password and an ACL file for a Redis.")] = False,
) -> None:
    """Make a token for every role; what is there already stays as it is. The launcher does this for its own runs.

    Example:  bapo tokens create secrets
    """
    tokens = TokenSet(folder)
    tokens.create()
    typer.echo(f"services accept what stands in {tokens.accepted_path}; tokens, by role:")
    for role in Role:
        typer.echo(f"  {role.value:<10} {tokens.path_of(role)}")
    if redis:
        made = RedisSecrets(tokens.folder)
        made.create()
        typer.echo(f"Redis: password in {made.password_path}, users for --aclfile in {made.users_path}")


@app.command()
def rotate(folder: Folder, role: Who) -> None:
    """Give a role a new token. The one before stays valid until `retire`.

    Example:  bapo tokens rotate outputs/demo-001/tokens worker
    """
    TokenSet(folder).rotate(role)
    typer.echo(f"{role.value} has a new token; {ACTIVE} are valid until: bapo tokens retire {folder} {role.value}")


@app.command()
def retire(folder: Folder, role: Who) -> None:
    """Accept only the newest token of a role; services notice within a second.

    Example:  bapo tokens retire outputs/demo-001/tokens worker
    """
    TokenSet(folder).retire(role)
    typer.echo(f"only the newest token of {role.value} is valid")
