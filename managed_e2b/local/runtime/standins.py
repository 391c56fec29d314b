"""Text of the files that template `base` makes instead of taking: accounts, profiles, and a stand-in for sudo.

Standard library only, and no I/O.
"""

from __future__ import annotations

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SETPRIV_ROOT = "/usr/local/lib/me2b/setpriv-root"
HOSTNAME = "e2b.local"


def passwd(one_id: bool) -> str:
    """With one id for all, `user` comes first, because it is the name that the id should have."""
    user = f"user:x:{0 if one_id else 1000}:{0 if one_id else 1000}::/home/user:/bin/bash\n"
    root = "root:x:0:0:root:/root:/bin/bash\n"
    rest = (
        "daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    )
    return (user + root if one_id else root + user) + rest


def group(one_id: bool) -> str:
    user = f"user:x:{0 if one_id else 1000}:\n"
    root = "root:x:0:\n"
    rest = "daemon:x:1:\nadm:x:4:\ntty:x:5:\nsudo:x:27:user\nstaff:x:50:\nusers:x:100:\nnogroup:x:65534:\n"
    return (user + root if one_id else root + user) + rest


_PAM = ("auth", "account", "password", "session")
FILES = {
    "etc/hostname": f"{HOSTNAME}\n",
    "etc/hosts": f"127.0.0.1\tlocalhost {HOSTNAME} e2b\n::1\tlocalhost ip6-localhost ip6-loopback\n",
    "etc/resolv.conf": "nameserver 8.8.8.8\n",
    "etc/nsswitch.conf": (
        "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nnetworks: files\n"
        "protocols: files\nservices: files\nethers: files\nrpc: files\n"
    ),
    # `adduser`, `su` and the like ask PAM; without a word on it they fail. Who is root inside may anything anyway.
    "etc/pam.d/other": "".join(f"{kind}\trequired\tpam_permit.so\n" for kind in _PAM),
    "etc/shells": "/bin/sh\n/bin/bash\n/usr/bin/sh\n/usr/bin/bash\n",
    "etc/profile": (
        f'export PATH="{PATH}"\n'
        'if [ -n "${BASH-}" ] && [ -n "${PS1-}" ] && [ -r /etc/bash.bashrc ]; then\n  . /etc/bash.bashrc\nfi\n'
        'if [ -d /etc/profile.d ]; then\n  for i in /etc/profile.d/*.sh; do\n    [ -r "$i" ] && . "$i"\n  done\n'
        "  unset i\nfi\n"
    ),
    "etc/bash.bashrc": ("[ -z \"${PS1-}\" ] && return\nshopt -s checkwinsize\nPS1='\\u@\\h:\\w\\$ '\n"),
    "home/user/.profile": 'if [ -n "$BASH_VERSION" ] && [ -f "$HOME/.bashrc" ]; then\n  . "$HOME/.bashrc"\nfi\n',
    "home/user/.bashrc": "case $- in\n  *i*) ;;\n  *) return ;;\nesac\nPS1='\\u@\\h:\\w\\$ '\n",
    "root/.profile": 'if [ -n "$BASH_VERSION" ] && [ -f "$HOME/.bashrc" ]; then\n  . "$HOME/.bashrc"\nfi\n',
    "root/.bashrc": "case $- in\n  *i*) ;;\n  *) return ;;\nesac\nPS1='\\u@\\h:\\w\\$ '\n",
}


def sudo(one_id: bool) -> str:
    """The host's own sudo cannot work here: its owner, the host's root, is nobody inside. Anyone may become anyone."""
    groups = "--keep-groups" if one_id else "--init-groups"
    return _SUDO.replace("@SETPRIV@", SETPRIV_ROOT).replace("@GROUPS@", groups).replace("@PATH@", PATH)


_SUDO = r"""#!/bin/sh
# sudo for a sandbox: everybody may become anybody, without a password.
usage() {
  echo 'usage: sudo [-EHiknSs] [-u user] [-g group] [VAR=value] [--] command [arg ...]' >&2
  exit 1
}

target=root group= keep= home_of_target= login= shell=
while [ $# -gt 0 ]; do
  case $1 in
    --) shift; break ;;
    --user=*) target=${1#*=} ;;
    --group=*) group=${1#*=} ;;
    --user) [ $# -ge 2 ] || usage; target=$2; shift ;;
    --group) [ $# -ge 2 ] || usage; group=$2; shift ;;
    --preserve-env | --preserve-env=*) keep=1 ;;
    --set-home) home_of_target=1 ;;
    --login) login=1 ;;
    --shell) shell=1 ;;
    --non-interactive | --stdin) ;;
    --validate | --reset-timestamp | --remove-timestamp) exit 0 ;;
    --version) echo 'sudo: stand-in of a sandbox'; exit 0 ;;
    --*) usage ;;
    -?*)
      letters=${1#-}
      while [ -n "$letters" ]; do
        rest=${letters#?}
        letter=${letters%"$rest"}
        letters=$rest
        case $letter in
          E) keep=1 ;;
          H) home_of_target=1 ;;
          i) login=1 ;;
          s) shell=1 ;;
          n | S | P | A) ;;
          k | K | v) [ $# -gt 1 ] || exit 0 ;;
          V) echo 'sudo: stand-in of a sandbox'; exit 0 ;;
          u | g)
            if [ -z "$letters" ]; then
              [ $# -ge 2 ] || usage
              letters=$2
              shift
            fi
            if [ "$letter" = u ]; then target=$letters; else group=$letters; fi
            letters= ;;
          *) usage ;;
        esac
      done ;;
    *) break ;;
  esac
  shift
done

command=
for word in "$@"; do
  case $word in
    [A-Za-z_]*=*) ;;
    *) command=$word; break ;;
  esac
done
[ -n "$command$login$shell" ] || usage

found=
while IFS=: read -r name _ uid gid _ home login_shell; do
  if [ "$name" = "$target" ] || [ "#$uid" = "$target" ]; then
    found=1
    break
  fi
done < /etc/passwd
if [ -z "$found" ]; then
  echo "sudo: unknown user $target" >&2
  exit 1
fi
[ -n "$login_shell" ] || login_shell=/bin/sh

if [ -n "$login$shell" ]; then
  [ -n "$login" ] || login_shell=${SHELL:-$login_shell}
  change=${login:+'cd "$HOME" || cd /; '}
  if [ -n "$command" ]; then
    set -- "$login_shell" ${login:+-l} -c "$change"'"$0" "$@"' "$@"
  else
    set -- "$@" "$login_shell" -c "${change}exec "'"$0" "$@"' "$login_shell" ${login:+-l}
  fi
fi

set -- "SUDO_COMMAND=$command" "SUDO_USER=$(id -un)" "SUDO_UID=$(id -u)" "SUDO_GID=$(id -g)" "$@"
set -- "LOGNAME=$name" "USER=$name" "$@"
if [ -z "$keep" ]; then
  set -- -i "HOME=$home" "SHELL=$login_shell" "PATH=@PATH@" "TERM=${TERM:-dumb}" ${LANG:+"LANG=$LANG"} "$@"
elif [ -n "$home_of_target" ]; then
  set -- "HOME=$home" "$@"
fi
exec @SETPRIV@ --reuid "$uid" --regid "${group:-$gid}" @GROUPS@ /usr/bin/env "$@"
"""
