# Tab completion of Laststep's command for zsh. In ~/.zshrc: source <(laststep completion zsh),
# or in a clone: source <(python /path/to/launch.py completion zsh)

_laststep() {
    local -i at=1  # index of laststep or launch.py among the words
    [[ ${words[1]:t} == python* ]] && at=2
    local script=${${(Q)words[at]}/#\~/$HOME} second name REPLY
    local -a python=($_laststep_python)
    (( at == 1 )) && script=$(whence -p -- $script)
    # The Tab key must never start another project's program.
    if (( CURRENT > at )) && [[ -f $script ]]; then
        if [[ ${script:t} == laststep ]]; then
            [[ $(<$script) == *'from laststep import main'* ]] && second='"""Laststep: ' python=()
        else
            { read -r && read -r second } <$script
        fi
    fi
    if [[ $second != '"""Laststep: '* ]]; then
        # Not Laststep's command: complete it as if this file had never been sourced.
        for name in $_laststep_names; do
            _comps[$name]=$_laststep_before[$name]
            [[ -n $_comps[$name] ]] || unset "_comps[$name]"
        done
        { _normal } always { compdef _laststep $_laststep_names }
        return
    fi

    local line=" ${(j: :)words[at + 1, CURRENT - 1]} $PREFIX" before=${(M)PREFIX##*=}
    local -a found=(${(f)"$($python $script __complete $line 2>/dev/null)"})
    compset -P '*='
    if [[ $found[1] == :files ]]; then
        _files
        return
    fi
    found=(${found#$before})
    local -i failed=1
    compadd -S '' -- ${(M)found:#*[=.]} && failed=0
    compadd -- ${found:#*[=.]} && failed=0
    return failed
}

(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
typeset -ga _laststep_names=(laststep launch.py python python3)
typeset -gA _laststep_before
for _laststep_name in $_laststep_names; do
    [[ $_comps[$_laststep_name] == _laststep ]] || _laststep_before[$_laststep_name]=$_comps[$_laststep_name]
done
unset _laststep_name
compdef _laststep $_laststep_names
