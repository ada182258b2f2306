# Sourced by the other scripts, from the root of the checkout. Makes virtual environments and keeps them good:
#
#   setup_venv          .venv with all the project needs and the dev extra; afterwards $venv_python is its Python
#   setup_triton_venv V .venv-triton<V>: triton V and what rendering and compiling need, nothing else
#
# An environment that is good already costs a fraction of a second and no network.
#
# Where python3 has a CUDA build of torch, and triton, the environment uses those. What is missing beside them
# comes from the folder .whl/ if there is one (machines that reach no package registry), else from pip's
# configured index. Elsewhere torch 2.13.0 is installed; pip takes its CPU build where an index or find-links
# of its configuration has one.
#
# PYTHON chooses another interpreter than python3. One of these environments is never built on, nor on another
# of them: where one is activated, the python3 behind it on the PATH is taken, so that activating changes nothing.

cpu_torch=2.13.0
cpu_pins=("torch==$cpu_torch" "triton==3.6.0" "numpy<2.4") # Triton 3.6's interpreter fails under numpy 2.4

setup_base() {
  setup_python=${PYTHON:-python3}
  command -v "$setup_python" >/dev/null || setup_fail "no $setup_python on the PATH; install Python 3.10 or newer, or set PYTHON"
  if setup_is_ours "$(dirname "$(command -v "$setup_python")")"; then setup_step_out; fi
  "$setup_python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    setup_fail "$setup_python is $("$setup_python" -V 2>&1); FlashGen needs Python 3.10 or newer, set PYTHON to one"
}

# Whether a folder is the bin of an environment that is made here.
setup_is_ours() { # FOLDER
  local dir
  for dir in .venv .venv-triton*; do
    [ "$1" -ef "$dir/bin" ] && return
  done
  return 1
}

# Takes the interpreter of the same name from the rest of the PATH, else python3, else the one that the
# environment was made with.
setup_step_out() {
  local folders folder name
  IFS=: read -r -a folders <<<"$PATH"
  for name in "$(basename "$setup_python")" python3; do
    for folder in "${folders[@]}"; do
      if [ -f "$folder/$name" ] && [ -x "$folder/$name" ] && ! setup_is_ours "$folder"; then
        setup_python=$folder/$name
        return
      fi
    done
  done
  setup_python=$("$setup_python" -c 'import sys; print(sys._base_executable)')
}

setup_fail() {
  echo "setup: $1" >&2
  exit 1
}

setup_say() { echo "setup: $1" >&2; }

# What an environment depends on: if this text changes, it is brought up to date.
setup_stamp() {
  "$setup_python" -c 'import sys; print(sys.version, sys.executable)'
  cat pyproject.toml scripts/setup.sh scripts/requirements.py
  ls .whl 2>/dev/null || true
  echo "$*"
}

setup_is_good() { # DIR STAMP
  [ "$(cat "$1/stamp" 2>/dev/null)" = "$2" ] && "$1/bin/python" -c 'import click, jinja2' 2>/dev/null
}

setup_make() { # DIR OPTIONS...
  local dir=$1
  shift
  [ -e "$dir/made" ] && "$dir/bin/python" -c '' 2>/dev/null && return
  rm -rf "$dir" # also what an interrupted run left: it may lack pip
  setup_say "making $dir with $("$setup_python" -V)"
  "$setup_python" -m venv "$@" "$dir" ||
    setup_fail "python3 -m venv $dir failed, see above; Debian and Ubuntu have venv in the package python3-venv"
  touch "$dir/made"
}

# Puts folders on the environment's path, and the command `flashgen` into its bin. The checkout is used as it
# lies there; tests/test_wheel.py installs the real package.
setup_link() { # DIR FOLDER...
  local dir=$1 site
  shift
  site=$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  printf '%s\n' "$@" >"$site/flashgen-checkout.pth"
  # By sh, since the path of an interpreter line may hold no space.
  printf '#!/bin/sh\nexec "%s" -c "from flashgen.cli.main import main; main(prog_name='"'flashgen'"')" "$@"\n' "$PWD/$dir/bin/python" >"$dir/bin/flashgen"
  chmod +x "$dir/bin/flashgen"
}

setup_pip() { # ARGUMENTS...: one line for each package, so that minutes are not silent
  "$venv_python" -m pip --disable-pip-version-check install "$@" | while IFS= read -r line; do
    case $line in
    Collecting*) setup_say "  fetching ${line#Collecting }" ;;
    "Installing collected packages:"*) setup_say "  unpacking all of them" ;;
    esac
  done
}

setup_venv() {
  setup_base
  venv_python=$PWD/.venv/bin/python
  local stamp
  stamp=$(setup_stamp dev | sha256sum)
  setup_is_good .venv "$stamp" && return
  if [ -n "$("$setup_python" -c 'import torch, triton; print(torch.version.cuda or "")' 2>/dev/null)" ]; then
    setup_venv_beside_cuda
  else
    setup_venv_from_index
  fi
  "$venv_python" -c 'import torch, triton, jinja2, optuna, sqlalchemy, alembic, click, rich, platformdirs, pytest' ||
    setup_fail "the environment lacks what the line above names"
  echo "$stamp" >.venv/stamp
}

setup_venv_beside_cuda() {
  setup_say "using the torch and triton of $setup_python"
  # python3 may itself live in a virtual environment, which a nested one does not see: name its folders.
  local folders
  mapfile -t folders < <("$setup_python" -c 'import sys; print(*(p for p in sys.path if p.endswith(("site-packages", "dist-packages"))), sep="\n")')
  setup_make .venv --system-site-packages --without-pip
  setup_link .venv "$PWD" "${folders[@]}"
  local requirements
  if [ -d .whl ]; then
    while true; do # a wheel's own needs show once it is installed
      mapfile -t requirements < <("$venv_python" scripts/requirements.py --missing --wheels=.whl dev)
      [ "${#requirements[@]}" -gt 0 ] || break
      setup_pip --no-index --no-deps --find-links .whl "${requirements[@]}" ||
        setup_fail "the wheels in .whl do not fit $("$setup_python" -V)"
    done
    mapfile -t requirements < <("$venv_python" scripts/requirements.py --missing dev)
    [ "${#requirements[@]}" -eq 0 ] || setup_say "not installed, .whl has no wheel: ${requirements[*]}"
  else
    mapfile -t requirements < <("$venv_python" scripts/requirements.py --missing dev)
    local held=.venv/constraints.txt
    "$venv_python" -c '
from importlib.metadata import version
for name in ("torch", "triton", "numpy"):
    print(f"{name}=={version(name)}")' >"$held"
    [ "${#requirements[@]}" -eq 0 ] || setup_pip -c "$held" "${requirements[@]}" ||
      setup_fail "pip could not install ${requirements[*]}; without a registry, put their wheels into .whl/ and run this again"
  fi
}

setup_venv_from_index() {
  setup_make .venv
  setup_link .venv "$PWD"
  local requirements
  mapfile -t requirements < <("$venv_python" scripts/requirements.py dev)
  if nvidia-smi -L >/dev/null 2>&1; then
    setup_say "installing torch with CUDA and the rest (gigabytes)"
    setup_pip "${requirements[@]}" || setup_fail "pip could not install ${requirements[*]}"
    return
  fi
  setup_say "installing torch $cpu_torch for CPUs and the rest (a minute or two)"
  setup_pip "${cpu_pins[@]}" "${requirements[@]}" || setup_fail "pip could not install ${cpu_pins[*]} ${requirements[*]}"
  [ -z "$("$venv_python" -c 'import torch; print(torch.version.cuda or "")')" ] ||
    setup_say "pip's index has only the CUDA build of torch, which works but is large; PIP_EXTRA_INDEX_URL can name PyTorch's CPU index"
}

setup_triton_venv() { # VERSION
  setup_base
  local minor=${1%.*}
  local dir=.venv-triton${minor//./}
  venv_python=$PWD/$dir/bin/python
  local stamp
  stamp=$(setup_stamp "$1" | sha256sum)
  setup_is_good "$dir" "$stamp" && return
  setup_make "$dir"
  setup_link "$dir" "$PWD"
  setup_say "installing triton $1 into $dir"
  # No torch: rendering and compiling do without it, and a test holds that.
  setup_pip "triton==$1" "jinja2>=3.1" "platformdirs>=4" "click>=8.1" "pytest>=8" "pytest-timeout>=2.3" || setup_fail "pip could not install triton $1"
  echo "$stamp" >"$dir/stamp"
}
