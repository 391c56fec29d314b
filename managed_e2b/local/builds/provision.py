"""What an image from a registry lacks to be a sandbox: the script that adds it, run as root inside. No I/O.

As upstream does, it makes user `user`, lets them become root, and opens /usr/local. It only uses bash and coreutils.
What the image has already stays, but for the files that name the host.
"""

from __future__ import annotations

import hashlib
import shlex

from managed_e2b.local.runtime import standins

_ALWAYS = ("etc/hostname", "etc/hosts", "etc/resolv.conf")
_IF_MISSING = ("etc/nsswitch.conf", "etc/profile", "root/.profile", "root/.bashrc")
_HOME = ("home/user/.profile", "home/user/.bashrc")


def script(*, one_id: bool) -> str:
    """`one_id`: there is no id but root's, which `user` shares then."""
    parts = [f"one_id={1 if one_id else ''}", f"setpriv_root={standins.SETPRIV_ROOT}", _BEGIN]
    parts += [f"rm -f /{name}; {_write(name)}" for name in _ALWAYS]
    parts += [f"[ -e /{name} ] || {_write(name)}" for name in _IF_MISSING]
    parts.append(_ACCOUNTS)
    parts += [f"[ -e /{name} ] || {_write(name)}" for name in _HOME]
    parts.append(_SUDO.replace("@STANDIN@", shlex.quote(standins.sudo(one_id))))
    parts.append(_END)
    return "\n".join(parts)


def version(*, one_id: bool) -> str:
    """Changes whenever what the script makes does."""
    return hashlib.sha256(script(one_id=one_id).encode()).hexdigest()


def _write(name: str) -> str:
    return f"printf %s {shlex.quote(standins.FILES[name])} > /{name}"


_BEGIN = """
set -eu
umask 022
for tool in mkdir chmod chown cp rm; do
  command -v $tool >/dev/null || { echo "the image has no $tool, which a sandbox needs" >&2; exit 1; }
done
mkdir -p /etc /home /root /run /tmp /var/tmp /usr/local/bin ${setpriv_root%/*}
chmod 1777 /tmp /var/tmp
[ -e /etc/mtab ] || ln -s /proc/self/mounts /etc/mtab
touch /etc/passwd /etc/group
"""

# Ids that are free, from 1000 on, as useradd would choose them.
_ACCOUNTS = r"""
has() { while IFS=: read -r name _; do [ "$name" != "$2" ] || return 0; done < "$1"; return 1; }
taken() { while IFS=: read -r _ _ id _; do [ "$id" != "$2" ] || return 0; done < "$1"; return 1; }
free() { next=1000; while taken "$1" $next; do next=$((next + 1)); done; echo $next; }
if ! has /etc/passwd root; then echo 'root:x:0:0:root:/root:/bin/bash' >> /etc/passwd; fi
if ! has /etc/group root; then echo 'root:x:0:' >> /etc/group; fi
if ! has /etc/passwd user; then
  if [ -n "$one_id" ]; then
    before=$(< /etc/passwd)
    printf 'user:x:0:0::/home/user:/bin/bash\n%s\n' "$before" > /etc/passwd
    before=$(< /etc/group)
    has /etc/group user || printf 'user:x:0:\n%s\n' "$before" > /etc/group
  else
    has /etc/group user || echo "user:x:$(free /etc/group):" >> /etc/group
    while IFS=: read -r name _ id _; do [ "$name" != user ] || gid=$id; done < /etc/group
    echo "user:x:$(free /etc/passwd):$gid::/home/user:/bin/bash" >> /etc/passwd
  fi
fi
has /etc/group sudo || echo 'sudo:x:27:user' >> /etc/group
mkdir -p /home/user
for file in /etc/skel/.[!.]* /etc/skel/*; do
  if [ -e "$file" ] && [ ! -e "/home/user/${file##*/}" ]; then cp -a "$file" /home/user/; fi
done
"""

# Of the image's own sudo nobody knows whether it works here; the stand-in needs a setpriv with long options.
_SUDO = r"""
setpriv=$(command -v setpriv || :)
if [ -n "$setpriv" ]; then
  case $($setpriv --help 2>&1) in
    *--reuid*)
      cp -L "$setpriv" $setpriv_root
      chown 0:0 $setpriv_root
      chmod 4755 $setpriv_root
      printf %s @STANDIN@ > /usr/local/bin/sudo
      chmod 755 /usr/local/bin/sudo ;;
    *) setpriv= ;;
  esac
fi
if [ -z "$setpriv" ]; then
  if command -v sudo >/dev/null; then
    echo 'user ALL=(ALL:ALL) NOPASSWD: ALL' >> /etc/sudoers
  else
    echo 'sandboxes of this image have no sudo: it has no setpriv (package util-linux)'
  fi
fi
"""

_END = r"""
[ -n "$one_id" ] || chown -R user:user /home/user
mkdir -p /code
chmod 777 /code
if command -v find >/dev/null; then
  find /usr/local -type d ! -path "${setpriv_root%/*}" -exec chmod 777 {} +
fi
"""
