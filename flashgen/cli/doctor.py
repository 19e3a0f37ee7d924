"""`flashgen doctor`: what is installed, what works with it, and what would mend the rest."""

from __future__ import annotations

import typer

from flashgen.cli.arguments import JsonOption
from flashgen.cli.output import print_json, print_table


def doctor(json: JsonOption = False) -> None:
    """Say what is installed and what works here.

    What does not work comes with a remedy. Ends with 1 where specs cannot be compiled and verified;
    a missing GPU is no reason for that.
    """
    from flashgen.cli.environment import report

    found = report()
    if json:
        print_json(found.to_dict())
    else:
        print_table([(f.name, f.state, f.detail) for f in found.findings])
        remedies = [(f.name, f.remedy) for f in found.findings if f.remedy]
        if remedies:
            typer.echo("\nremedies")
            print_table([(f"  {name}", remedy) for name, remedy in remedies])
        typer.echo("\nwhat works here")
        for ability in found.abilities:
            typer.echo(f"  {'yes' if ability.works else 'no '}  {ability.name}")
            for obstacle in ability.obstacles:
                typer.echo(f"         {obstacle}")
    if not found.can_build:
        raise typer.Exit(1)
