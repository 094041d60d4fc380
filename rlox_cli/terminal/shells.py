"""Completion scripts for bash and zsh, in place of Typer's.

Bash splits words at ``=`` and ``:``, but the arguments of rlox contain both. So these scripts pass the line up to the
cursor, and remove the part of each candidate that bash does not replace. They add no space after ``key=``.
"""

from __future__ import annotations

# The quotes at the end of the line are an empty word after a space, and nothing elsewhere.
BASH = """
%(complete_func)s() {
    local line="${COMP_LINE:0:COMP_POINT}" reply
    local word="${line##*[[:space:]]}"
    local end="$word"
    [[ $COMP_WORDBREAKS == *=* ]] && end="${end##*=}"
    [[ $COMP_WORDBREAKS == *:* ]] && end="${end##*:}"
    local kept="${word%%"$end"}"
    COMPREPLY=()
    while IFS= read -r reply; do
        [[ -n $reply ]] && COMPREPLY+=("${reply#"$kept"}")
    done < <(env COMP_WORDS="$line''" COMP_CWORD=-1 %(autocomplete_var)s=complete_bash "$1")
    if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=./] ]] && type compopt &> /dev/null; then
        compopt -o nospace
    fi
}

complete -o default -F %(complete_func)s %(prog_name)s
"""
ZSH = """
#compdef %(prog_name)s

%(complete_func)s() {
    local line="${words[1,$CURRENT]}''"
    local -a replies
    replies=("${(@f)$(env COMP_WORDS="$line" COMP_CWORD=-1 %(autocomplete_var)s=complete_bash %(prog_name)s)}")
    replies=(${replies:#})
    if (( ! $#replies )); then
        compset -P '*='
        _files
        return
    fi
    # Candidates are not compared with the word again: some replace it.
    compadd -U -S '' -- ${(M)replies:#*[=./]}
    compadd -U -- ${replies:#*[=./]}
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    %(complete_func)s "$@"
else
    compdef %(complete_func)s %(prog_name)s
fi
"""


def replace_scripts() -> None:
    """Let ``--install-completion`` and ``--show-completion`` use these scripts. Typer has no public way to do so."""
    from typer import _completion_shared

    _completion_shared._completion_scripts.update(bash=BASH, zsh=ZSH)
