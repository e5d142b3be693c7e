# Tab completion of Laststep's command for bash. In ~/.bashrc: source <(laststep completion bash),
# or in a clone: source <(python /path/to/launch.py completion bash)

_laststep() {
    local line=${COMP_LINE:0:COMP_POINT} word=${COMP_WORDS[0]} script second REPLY
    local -a python=("$_laststep_python")
    if [[ ${word##*/} == python* ]]; then
        (( COMP_CWORD > 1 )) && word=${COMP_WORDS[1]} script=${word/#\~/$HOME}
    else
        script=$(type -P -- "${word/#\~/$HOME}")
    fi
    # The Tab key must never start another project's program.
    if [[ ${word##*/} == laststep ]]; then
        [[ -f $script && $(<"$script") == *'from laststep import main'* ]] && second='"""Laststep: ' python=()
    elif [[ -f $script ]]; then
        { read -r && read -r second; } <"$script"
    fi
    if [[ $second != '"""Laststep: '* ]]; then
        _laststep_otherwise "$@"
        return
    fi

    mapfile -t COMPREPLY < <("${python[@]}" "$script" __complete "${line#*"$word"}" 2>/dev/null)
    if [[ ${COMPREPLY[0]} == :files ]]; then
        COMPREPLY=()
        return
    fi
    compopt +o bashdefault +o default
    [[ ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace
    # Where = breaks words, bash replaces only the part after it.
    word=${line##*[[:space:]]}
    [[ $COMP_WORDBREAKS == *=* ]] && COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*=}"}"}")
}

# Not Laststep's command: use the completion that was there before this file, or the one that bash-completion loads.
_laststep_otherwise() {
    local name=${1##*/} before option
    if [[ ! ${_laststep_before[$name]} && $(complete -p -D 2>/dev/null) =~ ' -F '([^ ]+) ]]; then
        "${BASH_REMATCH[1]}" "$name" "${@:2}"
        (( $? == 124 )) || return  # 124: a completion was loaded, try again
        _laststep_register
    fi
    before=${_laststep_before[$name]}
    [[ $before ]] || return
    for option in bashdefault default dirnames filenames noquote nosort nospace plusdirs; do
        if [[ $before == *" -o $option "* ]]; then compopt -o "$option"; else compopt +o "$option"; fi
    done 2>/dev/null
    if [[ $before =~ ' -F '([^ ]+) ]]; then
        "${BASH_REMATCH[1]}" "$@"
    else
        before=${before#complete }
        mapfile -t COMPREPLY < <(eval "compgen ${before% *} -- \"\$2\"")
    fi
}

_laststep_register() {
    local name before
    for name in laststep launch.py python python3; do
        before=$(complete -p "$name" 2>/dev/null)
        [[ $before == *' -F _laststep '* ]] || _laststep_before[$name]=$before
        complete -o bashdefault -o default -F _laststep "$name"
    done
}

declare -gA _laststep_before
_laststep_register
