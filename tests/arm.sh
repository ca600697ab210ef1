#!/bin/sh
# Makes a virtual environment for 64-bit ARM in a folder: Debian's Python, emulated by QEMU.
#
#     tests/arm.sh FOLDER PYTHON
#
# It needs Debian 12 on x86-64, whose sources of packages it reads, and 1.3 GB, all in the folder: no
# root, and nothing is installed on the machine. PYTHON runs pip.
# The environment's Python is a script, so those that tests start are emulated too.
set -eu
mkdir -p "$1"
folder=$(cd "$1" && pwd) python=$2
system=$folder/system apt=$folder/apt packages=$folder/lib/python3.11/site-packages
mkdir -p "$system" "$apt/lists/partial" "$apt/archives/partial" "$folder/bin" "$packages"

# As apt would install it on a machine of its own.
: >"$apt/status"
cat >"$apt/apt.conf" <<END
APT { Architecture "arm64"; Architectures { "arm64"; "amd64"; }; Install-Recommends "false"; };
Dir { State { Lists "$apt/lists"; status "$apt/status"; }; Cache "$apt"; };
END
export APT_CONFIG="$apt/apt.conf"
apt-get -q update
apt-get -q -y --download-only install python3 libstdc++6 qemu-user-static:amd64
for package in "$apt"/archives/*.deb; do
	dpkg-deb --extract "$package" "$system"
done

"$python" -m venv "$folder/pip"
"$folder/pip/bin/pip" install -q --upgrade --target "$packages" --python-version 3.11 \
	--only-binary=:all: --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 \
	--platform manylinux2014_aarch64 -c constraints.txt \
	absl-py hypothesis jax jaxtyping numba pytest rich
printf '%s\n' "$PWD" "$PWD/interop" >"$packages/pagedattn.pth"

echo "home = $system/usr/bin" >"$folder/pyvenv.cfg"
cat >"$folder/bin/python" <<END
#!/bin/sh
exec $system/usr/bin/qemu-aarch64-static -L $system -0 "\$0" $system/usr/bin/python3.11 "\$@"
END
chmod +x "$folder/bin/python"
rm -r "$apt" "$folder/pip"
